"""A byte-level text corpus that every Python installation carries: its own standard library.

The documents are the library's `.py` files and the reference texts behind `help("topics")`. Nothing is downloaded,
the order is fixed, and whole documents are held out, so a model is never scored on a file it has trained on. The text
differs a little between Python versions: compare losses within one interpreter only.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

# What is not the library itself; what distributions split into packages of their own, since as many installations as
# possible should give the same corpus; tables of numbers that only look like source; the topics, read in their own way.
SKIPPED_DIRECTORIES = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "idle_test"}
SKIPPED_DIRECTORIES |= {"lib2to3", "tkinter", "turtledemo", "ensurepip", "encodings", "pydoc_data"}
HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class Corpus:
    """Two disjoint texts.

    Attributes:
        train: uint8, the training documents one after the other.
        held_out: uint8, the documents never trained on.
        documents: how many documents there are in both together.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    documents: int


def load_corpus() -> Corpus:
    """Read the standard library and split it by document.

    Returns:
        The corpus; the same bytes on every rank that runs the same Python.

    Raises:
        RuntimeError: the library's sources are not there as files (a zipped or stripped Python).
    """
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    for name, text in _documents(Path(sysconfig.get_path("stdlib"))):
        parts[_is_held_out(name)].append(text)
    if not parts[False] or not parts[True]:
        raise RuntimeError(
            f"Found no standard library sources under {sysconfig.get_path('stdlib')}. "
            "This example reads them as its corpus; run it with a Python that ships its .py files."
        )
    return Corpus(_to_tensor(parts[False]), _to_tensor(parts[True]), len(parts[False]) + len(parts[True]))


def training_batch(
    text: torch.Tensor, *, sequences: int, context: int, seed: int, step: int, rank: int = 0, world_size: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw this rank's share of one step's batch.

    The batch is a function of (seed, step) alone, so two runs see the same data, a resumed run continues with the
    data it would have seen, and there is no sampler state to save.

    Args:
        text: uint8 [bytes].
        sequences: sequences per rank.
        context: tokens per sequence.
        seed: selects the stream of batches.
        step: the step the batch is for, from 0.
        rank: this process.
        world_size: processes that share the batch.

    Returns:
        Inputs and targets, int64 [sequences, context] each; the targets are the inputs shifted by one.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - context, (world_size * sequences,), generator=generator)
    return _windows(text, starts[rank * sequences : (rank + 1) * sequences], context)


def held_out_batches(
    text: torch.Tensor, *, sequences: int, context: int, batch: int, rank: int = 0, world_size: int = 1
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Walk over this rank's share of evenly spaced windows of the held-out text.

    Args:
        text: uint8 [bytes].
        sequences: windows in all, over all ranks.
        context: tokens per window.
        batch: windows per yielded batch.
        rank: this process.
        world_size: processes that share the windows.

    Yields:
        Inputs and targets, int64 [<= batch, context] each.
    """
    starts = torch.arange(sequences) * (len(text) - context - 1) // max(sequences - 1, 1)
    for mine in starts[rank::world_size].split(batch):
        yield _windows(text, mine, context)


def _documents(root: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name, text) of every document, in an order that does not depend on the file system."""
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = sorted(set(subdirectories) - SKIPPED_DIRECTORIES)
        for file in sorted(files):
            if file.endswith(".py") and not file.startswith("_sysconfigdata"):
                path = Path(directory, file)
                yield path.relative_to(root).as_posix(), path.read_bytes()
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions ship it with their documentation
        return
    for name in sorted(topics):
        yield f"topics/{name}", topics[name].encode()


def _is_held_out(name: str) -> bool:
    """Decide by name, so that adding or removing one document moves no other across the split."""
    return zlib.crc32(name.encode()) % HELD_OUT_ONE_IN == 0


def _to_tensor(parts: list[bytes]) -> torch.Tensor:
    # bytearray: torch warns about tensors over read-only memory.
    return torch.frombuffer(bytearray(b"\n".join(parts)), dtype=torch.uint8)


def _windows(text: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut windows of context + 1 bytes and split them into inputs and targets, int64 [len(starts), context] each."""
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]
