"""Compile every kernel as it is launched, for real GPUs, without one, and check what comes out.

    python -m tests.aot.compile_kernels            the variants of `plan`; the tests run this
    python -m tests.aot.compile_kernels --write    likewise, and write the table into kernels/README.md
    python -m tests.aot.compile_kernels --every    all variants, which takes long; leaves the table alone

Prints a JSON object for each variant. The exit status is 1 if one does not compile or breaks a rule of gates.py, or if
the table is not the one that these kernels give with the pinned Triton: standard error says which.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from onebit_triton.kernels.common import interpreted

from .gates import Facts, facts, violations
from .launches import Call, Choice, Launch, Setting, block_sizes, record

ARCHITECTURES = (80, 90, 100)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIXED = Setting(dtype=torch.bfloat16, grad_dtype=torch.float32)
RANKS = (2, 3, 4, 8, 16, 64)
BY_RANKS = (
    "flatten_gradients", "decide_averaged", "clip_local", "decide_exchanged", "seal_worker", "reduce_chunk",
)  # fmt: skip
"""Passes whose code depends on the number of ranks."""

CHUNK_BLOCKS = (3, 1, 16)
WORKERS = 2
"""Compiling processes."""

ROOT = Path(__file__).parents[2]
README = ROOT / "kernels" / "README.md"
COMMAND = "python -m tests.aot.compile_kernels --write"
BEGIN, END = "<!-- compiled kernels: begin -->\n", "<!-- compiled kernels: end -->\n"


@dataclass(frozen=True)
class Compiled:
    """One launch, compiled for one architecture; without facts if that failed."""

    launch: Launch
    arch: int
    facts: Facts | None
    problems: list[str]


def plan(arch: int, name: str, choices: list[Choice]) -> Iterator[Call]:
    """Calls in which everything that can differ does, though not in every combination.

    The first and the last choice in fp32 and the first in bf16 on every architecture; `others` on one each.
    """
    yield Setting(), choices[0]
    yield Setting(), choices[-1]
    yield Setting(torch.bfloat16), choices[0]
    yield from itertools.islice(others(name, choices), ARCHITECTURES.index(arch), None, len(ARCHITECTURES))


def others(name: str, choices: list[Choice]) -> Iterator[Call]:
    """The other choices, dtypes, no alignment, ranks: one at a time. Other block sizes: together with some of those."""
    usual, sizes = Setting(), block_sizes()
    for choice in choices[1:-1]:
        yield usual, choice
    for setting in (Setting(torch.bfloat16), Setting(torch.float16), MIXED, Setting(aligned=False)):
        yield setting, choices[-1]
    if name in BY_RANKS:
        for block, ranks in itertools.product((usual.block, sizes[-1]), RANKS):
            yield Setting(block=block, ranks=ranks), choices[-1]
    for i, block in enumerate(sizes):
        if block != usual.block:
            dtype, ranks, chunk_blocks = (values[i % len(values)] for values in (DTYPES, RANKS, CHUNK_BLOCKS))
            yield Setting(dtype, block=block, ranks=ranks, chunk_blocks=chunk_blocks), choices[i % len(choices)]


def every(_: int, name: str, choices: list[Choice]) -> Iterator[Call]:
    """All combinations, but for what Triton makes of numbers."""
    for (dtype, grad_dtype), aligned, block, ranks, choice in itertools.product(
        [*((dtype, None) for dtype in DTYPES), (MIXED.dtype, MIXED.grad_dtype)],
        (True, False),
        block_sizes(),
        RANKS if name in BY_RANKS else RANKS[:1],
        choices,
    ):
        yield Setting(dtype, grad_dtype, aligned, block, ranks), choice


def resources(cubin: bytes) -> dict[str, int]:
    """What a compiled kernel needs, in cuobjdump's words: REG, STACK, LOCAL, and more."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    pairs = (field.split(":") for field in said.split() if field.count(":") == 1)
    return {word: int(number) for word, number in pairs if number.isdigit()}


def compile_launch(job: tuple[Launch, int]) -> Compiled:
    """Compile a launch for an architecture, and check the result."""
    launch, arch = job
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    try:
        made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    except Exception as error:  # whatever the compiler raises: the other kernels are to be seen as well
        return Compiled(launch, arch, None, [f"does not compile: {error}"])
    found = facts(made.asm["ttir"], made.asm["ptx"], made.metadata.shared, resources(made.asm["cubin"]))
    return Compiled(launch, arch, found, list(violations(launch, found)))


def table(compiled: list[Compiled]) -> str:
    """The table for kernels/README.md: a row per kernel, and a value per architecture where they differ."""

    def cell(values: Iterable[object]) -> str:
        shown = [str(value) for value in values]
        return shown[0] if len(set(shown)) == 1 else " / ".join(shown)

    def widest(accesses: dict[int, int]) -> str:
        return f"{accesses[max(accesses)]} of {max(accesses)}"

    architectures = ", ".join(f"sm_{arch}" for arch in ARCHITECTURES)
    lines = [
        f"Triton {triton.__version__}, {len(compiled)} variants on {architectures}; one number where these agree.",
        "A row shows the kernel in fp32, aligned, with blocks of 1024 and nothing optional; *most* is what its most",
        "demanding variant takes. Loads and stores: how many there are of the widest, and their bits.",
        "",
        "| kernel | registers | most | shared | stack | loads | stores | barriers | shuffles |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(one.launch.name for one in compiled):
        mine = [(one.launch, one.facts) for one in compiled if one.launch.name == name and one.facts]
        usual = [facts for launch, facts in mine if launch.usual]
        columns = (
            cell(facts.registers for facts in usual),
            str(max(facts.registers for _, facts in mine)),
            cell(facts.shared for facts in usual),
            cell(facts.stack for facts in usual),
            cell(widest(facts.loads) for facts in usual),
            cell(widest(facts.stores) for facts in usual),
            cell(facts.barriers for facts in usual),
            cell(facts.shuffles for facts in usual),
        )
        lines.append(f"| `{name}` | {' | '.join(columns)} |")
    return "\n".join([*lines, ""])


def pinned() -> bool:
    """Whether this Triton is the one that is pinned, which the table is of; others may take other registers."""
    return f"triton=={triton.__version__}\n" in (ROOT / "constraints.txt").read_text()


def readme_parts() -> tuple[str, str, str]:
    """kernels/README.md: up to the table, the table, and from its end."""
    text = README.read_text()
    if not 0 <= text.find(BEGIN) < text.find(END):
        sys.exit(f"{README} must have the lines {BEGIN.strip()} and {END.strip()}, where the table belongs.")
    start, stop = text.index(BEGIN) + len(BEGIN), text.index(END)
    return text[:start], text[start:stop], text[stop:]


def main() -> None:
    """Compile, print, check, and write the table if asked to."""
    parser = argparse.ArgumentParser(description="Compile every kernel for real GPUs and check what comes out.")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--write", action="store_true", help="write the table into kernels/README.md")
    what.add_argument("--every", action="store_true", help="compile all variants, which takes an hour or more")
    args = parser.parse_args()
    if interpreted():
        parser.error("nothing compiles in Triton's interpreter: unset TRITON_INTERPRET")
    before, inside, after = readme_parts()
    calls = every if args.every else plan
    jobs = [(launch, arch) for arch in ARCHITECTURES for launch in record(partial(calls, arch))]
    knobs.compilation.disable_line_info = True  # the code is the same, and sooner done
    compiled = []
    with multiprocessing.get_context("fork").Pool(WORKERS) as pool:
        for one in pool.imap(compile_launch, jobs):
            compiled.append(one)
            shown = {"kernel": str(one.launch), "arch": one.arch, "problems": one.problems}
            print(json.dumps(shown | (asdict(one.facts) if one.facts else {})), flush=True)
    problems = [f"{one.launch} on sm_{one.arch}: {problem}" for one in compiled for problem in one.problems]
    if not args.every and all(one.facts for one in compiled):
        found = table(compiled)
        if args.write:
            README.write_text(before + found + after)
        elif pinned() and inside != found:
            problems.append(f"The table in {README} is not the one that these kernels give: run {COMMAND}")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
