"""What compiled kernels must be: the rules, and all the numbers they need."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .launches import PARTIALS, Launch

REGISTERS = {
    "flatten_gradients": 40,
    "gradient_norms": 64,
    "decide_averaged": 48,
    "clip_local": 24,
    "decide_exchanged": 128,
    "accept_returned": 64,
    "lamb_moments": 80,
    "trust_ratio": 40,
    "lamb_apply": 64,
    "compress_momentum": 96,
    "seal_worker": 48,
    "undo_momentum": 56,
    "reduce_chunk": 128,
    "seal_server": 48,
    "fresh_variance": 128,
    "soft_threshold_rate": 40,
    "compressed_apply": 72,
}
"""Pass -> registers that a thread may have in any variant, on any GPU: what was measured, and a little. GPUs allot them
in eights, and 128 leave room for 16 warps on a multiprocessor."""

READS = {
    "flatten_gradients": ("grads",),
    "gradient_norms": ("grads",),
    "lamb_moments": ("params", "grads", "exp_avg", "exp_avg_sq"),
    "lamb_apply": ("params", "exp_avg", "exp_avg_sq"),
    "compress_momentum": ("grads", "x", "exp_avg"),
    "undo_momentum": ("grads", "x", "exp_avg"),
    "reduce_chunk": ("y",),
    "fresh_variance": ("params", "grads", "exp_avg", "exp_avg_sq", "exp_avg_sq_fresh"),
    "compressed_apply": ("params", "exp_avg", "exp_avg_sq"),
}
"""Pass -> what it reads element by element, if it is given."""

WRITES = {
    "flatten_gradients": ("out",),
    "gradient_norms": (),
    "lamb_moments": ("exp_avg", "exp_avg_sq"),
    "lamb_apply": ("params", "copies"),
    "compress_momentum": ("x",),
    "undo_momentum": ("x",),
    "reduce_chunk": ("y",),
    "fresh_variance": ("exp_avg", "exp_avg_sq_fresh"),
    "compressed_apply": ("params", "copies"),
}
"""Pass -> what it writes element by element; the momentum only where there are gradients to move it by."""

REDUCED = PARTIALS | {"decide_averaged": 4, "clip_local": 1, "seal_worker": 4, "seal_server": 3}
"""Pass -> 32-bit values that a program reduces over its threads; the check of a message is of 64 bits."""

DECIDING = ("decide_exchanged", "accept_returned")
"""Passes that look at words of all ranks' headers: tiny, and in two dimensions; their reductions are not counted."""


@dataclass(frozen=True)
class Facts:
    """What a kernel was compiled to.

    Attributes:
        registers: per thread.
        stack, local: bytes per thread; spills are among them.
        shared: bytes per program.
        loads, stores: bits of an access to global memory -> number of such instructions.
        barriers, shuffles, atomics: number of instructions.
        contracted: fused multiply-adds in PTX; approximate: divisions and roots that are not rounded to nearest.
        narrow: lines of TTIR in which a program id is multiplied, or added to a pointer, in less than 64 bits.
    """

    registers: int
    stack: int
    local: int
    shared: int
    loads: dict[int, int]
    stores: dict[int, int]
    barriers: int
    shuffles: int
    atomics: int
    contracted: int
    approximate: int
    narrow: list[str]


def accesses(ptx: str, instruction: str) -> dict[int, int]:
    """Bits that an access to global memory moves for a thread -> how many of those PTX has; instruction: ld or st."""
    found: dict[int, int] = {}
    for vector, bits in re.findall(rf"\b{instruction}\.global\b\S*?(?:\.v(\d))?\.[bsuf](\d+)\s", ptx):
        width = int(vector or 1) * int(bits)
        found[width] = found.get(width, 0) + 1
    return found


def narrow_offsets(ttir: str) -> list[str]:
    """Lines of TTIR in which a program id is multiplied, or added to a pointer, before it is extended to 64 bits.

    A program id is followed through all operations but loads and comparisons. A line where it enters or leaves a loop
    or a branch counts as well: it is not followed there.
    """
    narrow: set[str] = set()
    found = []
    for line in ttir.splitlines():
        result, operation = re.match(r"\s*(?:(%[^\s:]+)\S* = )?(.*)", line).groups()
        if operation.startswith("tt.get_program_id"):
            narrow.add(result)
        elif narrow.isdisjoint(re.findall(r"%[\w$.-]+", operation)):
            continue
        elif re.match(r"tt\.addptr|arith\.muli|arith\.shli|scf\.|cf\.", operation):
            found.append(line.partition(" loc(")[0].strip())
        elif result and not re.match(r"arith\.extsi .* to i64|tt\.load|arith\.cmpi", operation):
            narrow.add(result)
    return found


def facts(ttir: str, ptx: str, shared: int, usage: dict[str, int]) -> Facts:
    """Facts about a kernel from two stages of its compilation, its shared memory, and what cuobjdump says it uses."""

    def count(pattern: str) -> int:
        return len(re.findall(pattern, ptx))

    return Facts(
        registers=usage["REG"],
        stack=usage["STACK"],
        local=usage["LOCAL"],
        shared=shared,
        loads=accesses(ptx, "ld"),
        stores=accesses(ptx, "st"),
        barriers=count(r"\b(?:bar|barrier)\.\S*sync"),
        shuffles=count(r"\b(?:shfl|redux)\.sync"),
        atomics=count(r"\b(?:atom|red)\."),
        contracted=count(r"\b(?:fma|mad)\.r[nzmp]\S*\.f\d"),
        approximate=count(r"\.approx\b|\bdiv\.full\b"),
        narrow=narrow_offsets(ttir),
    )


def wide_accesses(launch: Launch, tensors: tuple[str, ...]) -> dict[int, int]:
    """Bits of an access -> how many of those a thread needs on the main path to walk these tensors.

    Only accesses of at least 64 bits: narrower ones look like those of scalars.
    """
    setting, lanes = launch.setting, _lanes(launch)
    own = max(1, lanes // (32 * launch.options["num_warps"]))
    grad_size = (setting.grad_dtype or setting.dtype).itemsize
    sizes = {"copies": setting.dtype.itemsize, "grads": grad_size, "out": setting.dtype.itemsize}
    needed: dict[int, int] = {}
    for tensor in tensors:
        size = sizes.get(tensor, 4)
        elements = min(own, 16 // size)
        if tensor in ("params", "copies", "grads") and not setting.aligned:
            elements = 1
        width = 8 * size * elements
        if width >= 64:
            needed[width] = needed.get(width, 0) + setting.block // lanes * (own // elements)
    return needed


def violations(launch: Launch, got: Facts) -> Iterator[str]:
    """What is wrong with a compiled launch, in words."""
    warps, choice = launch.options["num_warps"], launch.choice
    if launch.options["enable_fp_fusion"]:
        yield "enable_fp_fusion is on"
    for what in ("stack", "local", "atomics", "contracted", "approximate", "narrow"):
        if getattr(got, what):
            yield f"{what} is {getattr(got, what)}"
    if got.registers > REGISTERS[launch.name]:
        yield f"{got.registers} registers, budget {REGISTERS[launch.name]}"
    given: dict[str, tuple[str, ...]] = {"loads": (), "stores": ()}
    if launch.constant("BLOCK"):
        given["loads"] = tuple(t for t in READS[launch.name] if choice.get(t, True))
        given["stores"] = tuple(t for t in WRITES[launch.name] if choice.get("grads" if t == "exp_avg" else t, True))
    for kind, tensors in given.items():
        have = getattr(got, kind)
        for width, needed in wide_accesses(launch, tensors).items():
            if have.get(width, 0) < needed:
                yield f"{have.get(width, 0)} {kind} of {width} bits, {', '.join(tensors)} need {needed}"
        # A message's header is copied byte by byte; planes are not.
        if launch.setting.block >= 1024 and have.get(8, 0) > 1:
            yield f"{have[8]} {kind} of 8 bits"
    reduced = REDUCED.get(launch.name, 0) + choice.get("track_rho", False)
    # Where a parameter is not aligned, another thread stores its new values than the one that computed them.
    if launch.name not in DECIDING and (launch.setting.aligned or "params" not in given["stores"]):
        barriers = 3 * reduced - 1 if reduced and warps > 1 else 0
        if got.barriers > barriers:
            yield f"{got.barriers} barriers, its reductions need {barriers}"
        shuffles = reduced * ((min(32, _lanes(launch)) * warps).bit_length() - 1)
        if got.shuffles > shuffles:
            yield f"{got.shuffles} shuffles, its reductions need {shuffles}"


def _lanes(launch: Launch) -> int:
    """Elements that a program handles at a time: a tile, or those of one or more planes."""
    return launch.constant("TILE") or launch.setting.block // 8 * launch.constant("PLANES")
