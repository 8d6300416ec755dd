"""What is measured, and the processes that measure: tensors shaped like a transformer's, and ranks that take turns."""

from __future__ import annotations

import inspect
import math
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist

from onebit_triton import OneBitLamb

from .counting import Count
from .rivals import EPS, LR, WEIGHT_DECAY

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

BACKENDS = ["triton", "inductor"] if DEVICE.type == "cuda" else ["torch", "inductor"]
"""The interpreter's time says nothing about speed, so on a CPU there is no Triton."""

SIZES = {"64k": (32, 32), "1M": (128, 64), "8M": (320, 5760), "64M": (1024, 1024)}
"""Name of a size -> width and vocabulary of a transformer of `LAYERS` layers: 63 tensors, about so many parameters."""

LAYERS = 5

BLOCK_ELEMENTS, BUCKET_ELEMENTS = (
    inspect.signature(OneBitLamb).parameters[name].default for name in ("block_elements", "bucket_elements")
)

UNTIMED = 5
"""Steps before the first that is timed: the switch, first allocations and compiling are over."""

SECONDS, ROUNDS = 8.0, (5, 25)
"""How long a comparison goes on, and the fewest and most steps of every optimizer that are timed."""


def shapes(size: str) -> list[tuple[int, ...]]:
    """Shapes of all parameters: an embedding, and for each layer four matrices, their biases and two norms."""
    width, vocabulary = SIZES[size]
    found: list[tuple[int, ...]] = [(vocabulary, width)]
    for _ in range(LAYERS):
        for rows, columns in ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width)):
            found += [(rows, columns), (rows,)]
        found += [(width,)] * 4
    return [*found, (width,), (width,)]


def elements(size: str) -> int:
    """Number of parameters."""
    return sum(math.prod(shape) for shape in shapes(size))


def padded_elements(size: str) -> int:
    """Number of parameters with every tensor padded to blocks."""
    return sum(-(-math.prod(shape) // BLOCK_ELEMENTS) for shape in shapes(size)) * BLOCK_ELEMENTS


def parameters(size: str, rank: int = 0) -> list[torch.nn.Parameter]:
    """Parameters, alike on all ranks, with gradients that are not."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter((torch.randn(s, generator=generator) * 0.02).to(DEVICE)) for s in shapes(size)]
    generator.manual_seed(1 + rank)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * 0.01).to(DEVICE)
    return params


def onebit_lamb(params: list[Any], stage: str, backend: str, alone: Any) -> OneBitLamb:
    """Our optimizer, soon in one stage. In warmup it works in a group of its own, so that no averaging is timed."""
    return OneBitLamb(
        params, lr=LR, weight_decay=WEIGHT_DECAY, eps=EPS, backend=backend,
        freeze_step=2 if stage == "compression" else 10**9, process_group=alone if stage == "warmup" else None,
    )  # fmt: skip


def wait() -> None:
    """Wait for the device."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


@dataclass
class Candidate:
    """Something that all ranks do together, to be measured.

    Attributes:
        step: does it once.
        bytes_sent: how many bytes this rank has sent so far.
        count: does it once more, and says what that took; None where nothing is launched.
    """

    step: Callable[[], object]
    bytes_sent: Callable[[], int]
    count: Callable[[], Count] | None = None


@dataclass
class Measurement:
    """Seconds of every round, until the slowest rank was done; and what one step sends, launches and moves."""

    seconds: list[float]
    wire_bytes: int
    count: Count


def take_turns(candidates: dict[str, Candidate]) -> dict[str, Measurement]:
    """Measure candidates on this rank in turns, A B A B, so that whatever else the machine does hits all alike."""
    found = {}
    for name, candidate in candidates.items():
        for _ in range(UNTIMED):
            candidate.step()
        before = candidate.bytes_sent()
        candidate.step()
        sent = candidate.bytes_sent() - before
        found[name] = Measurement([], sent, candidate.count() if candidate.count else Count())
    turn = sum(_timed(candidate.step) for candidate in candidates.values())
    rounds = torch.tensor(SECONDS / turn).clamp(*ROUNDS).int()
    dist.broadcast(rounds, src=0)
    for _ in range(int(rounds)):
        for name, candidate in candidates.items():
            found[name].seconds.append(_timed(candidate.step))
    return found


def _timed(step: Callable[[], object]) -> float:
    """Seconds that a step takes from when all ranks are ready until this one is done."""
    wait()
    dist.barrier()
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start


def on_ranks(ranks: int, function: Callable[..., dict[Any, Measurement]], *args: Any) -> dict[Any, Measurement]:
    """What function(rank, *args) measures on processes that form a gloo group, one thread each."""
    context = get_context("forkserver")  # forked off a process that has only imported what takes long to import
    context.set_forkserver_preload(["onebit_triton", "torch._dynamo", "pytorch_optimizer"])
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(ranks, mp_context=context) as pool:
        # Every call blocks until all ranks have met, so each gets a process of its own.
        calls = [pool.submit(_join, f"{folder}/store", rank, ranks, function, args) for rank in range(ranks)]
        first, *others = [call.result() for call in calls]
    for name, measurement in first.items():
        turns = zip(measurement.seconds, *(other[name].seconds for other in others), strict=True)
        measurement.seconds = [max(turn) for turn in turns]
    return first


def _join(store: str, rank: int, ranks: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(minutes=2)
    )
    try:
        return function(rank, *args)
    finally:
        dist.destroy_process_group()


class Clock:
    """A timer for pytest-benchmark that shows what ranks measured, rather than what waiting for them takes."""

    __name__ = "measured by the ranks"

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        return self._now

    def replay(self, benchmark: Any, seconds: list[float]) -> None:
        """Hand measured rounds to the benchmark fixture."""
        rounds = iter(seconds)

        def advance() -> None:
            self._now += next(rounds)

        benchmark.pedantic(advance, rounds=len(seconds))


CLOCK = Clock()
