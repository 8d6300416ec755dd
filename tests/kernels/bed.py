"""A bucket among canaries, in equal copies for a kernel and its twin, and the comparison of what they leave behind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onebit_triton.buckets import BucketLayout, block_map, plan_layout
from onebit_triton.kernels.backends import Passes, load_passes
from onebit_triton.kernels.planes_reference import balance, check_sum, header, planes
from onebit_triton.kernels.tables import HEADER_BYTES, Clip, Decision, Header, Hyper, Rate, Roll, Stamp, TensorTable

CPU = torch.device("cpu")
TRITON = load_passes("triton", CPU)
TORCH = load_passes("torch", CPU)

CANARY = 0xFF
"""Fills all memory that no tensor owns, and outputs before a kernel runs: NaN in every float dtype, -1 as integer."""

GARBAGE = 0x5A
"""Fills outputs before a twin runs, so that only what both overwrite can be equal."""

GUARD = 4096
"""Canary bytes between tensors: as many as a block of 1024 fp32."""

RTOL = 5e-6
"""Relative difference that another order of summation may cause."""

MISALIGNED = 1
"""Elements by which tensors are moved off a 16-byte boundary."""

TINY = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 40, 41, 50, 55, 60, 63, 64, 65, 66, 68, 69, 70, 1, 1, 13, 29, 47, 58)


@dataclass(frozen=True)
class Case:
    """Sizes, layout, dtypes and options of a bed."""

    name: str
    sizes: tuple[int, ...]
    block: int = 64
    ranks: int = 1
    dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype | None = None
    shift: int = 0
    bias_correction: bool = True
    coeff_bias_correction: bool = True
    weight_decay: float | None = None
    grad_scale: float = 1.0

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("many_tiny", TINY),
    Case("huge", (3, 64 * 19 + 5, 70), ranks=2, bias_correction=False, grad_scale=0.37),
    Case("three_ranks", (100, 1, 333, 64), ranks=3, dtype=torch.bfloat16, shift=MISALIGNED),
    Case("four_ranks", (5, 200, 129), ranks=4, dtype=torch.float16, shift=MISALIGNED, coeff_bias_correction=False),
    Case("more_ranks_than_blocks", (3,), ranks=4, weight_decay=0.0),
    Case("block_128", (128, 127, 129, 640, 1), block=128, ranks=2, shift=MISALIGNED, weight_decay=0.05),
    Case("block_1024", (1, 2500, 1024, 1023), block=1024, ranks=2, dtype=torch.bfloat16, bias_correction=False),
    Case("fp32_gradients", (7, 128, 300), block=128, dtype=torch.bfloat16, grad_dtype=torch.float32, grad_scale=0.5),
    Case("fp16_gradients", (65, 2, 64), ranks=2, grad_dtype=torch.float16, shift=MISALIGNED, weight_decay=0.0),
)

FEW_CASES = tuple(case for case in CASES if case.name in ("four_ranks", "block_1024", "fp16_gradients"))
"""For the modes of a pass that differ little from another."""

SMALL = Case("small", (70, 3, 64, 129), ranks=2, grad_scale=0.5)


GROUPS: tuple[dict[str, Any], ...] = (
    {
        "lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "coeff": (0.01, 10.0),
        "coeff_beta": 0.9, "factor": (0.5, 4.0), "threshold": 0.1, "rate_ratio": float("inf"),
    },
    {
        "lr": 3e-3, "betas": (0.5, 0.9), "eps": 1e-3, "weight_decay": 0.0, "coeff": (0.3, 0.31),
        "coeff_beta": 0.5, "factor": (0.9, 1.05), "threshold": 0.02, "rate_ratio": 1.5,
    },
    {
        "lr": 0.2, "betas": (0.75, 0.6), "eps": 1e-6, "weight_decay": 0.1, "coeff": (0.0, 100.0),
        "coeff_beta": 0.99, "factor": (0.01, 50.0), "threshold": 0.9, "rate_ratio": 0.01,
    },
)  # fmt: skip
"""Hyperparameters of the param groups; segments take them in turn."""


def group_of(case: Case, segment: int) -> dict[str, Any]:
    """Hyperparameters of a segment."""
    group = dict(GROUPS[segment % len(GROUPS)])
    if case.weight_decay is not None:
        group["weight_decay"] = case.weight_decay
    return group


def hyper_row(case: Case, segment: int) -> Tensor:
    """A segment's row of the hyperparameter table; complements are taken in double precision."""
    group = group_of(case, segment)
    row = {
        Hyper.LR: group["lr"],
        Hyper.BETA1: group["betas"][0],
        Hyper.ONE_MINUS_BETA1: 1 - group["betas"][0],
        Hyper.BETA2: group["betas"][1],
        Hyper.ONE_MINUS_BETA2: 1 - group["betas"][1],
        Hyper.EPS: group["eps"],
        Hyper.WEIGHT_DECAY: group["weight_decay"],
        Hyper.MIN_COEFF: group["coeff"][0],
        Hyper.MAX_COEFF: group["coeff"][1],
        Hyper.COEFF_BETA: group["coeff_beta"],
        Hyper.ONE_MINUS_COEFF_BETA: 1 - group["coeff_beta"],
        Hyper.FACTOR_MIN: group["factor"][0],
        Hyper.FACTOR_MAX: group["factor"][1],
        Hyper.THRESHOLD_LOW: 1 - group["threshold"],
        Hyper.THRESHOLD_HIGH: 1 + group["threshold"],
        Hyper.MAX_RATE_RATIO: group["rate_ratio"],
        Hyper.COEFF_BIAS_CORRECTION: float(case.coeff_bias_correction),
    }
    return torch.tensor([row[column] for column in Hyper], dtype=torch.float64).float()


class Memory:
    """Named tensors in one buffer of canary bytes."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        self._stop = GUARD
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def add(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, shift: int = 0) -> None:
        """Plan a tensor that starts `shift` elements behind a 64-byte boundary."""
        start = -(-self._stop // 64) * 64 + shift * dtype.itemsize
        self._places[name] = (start, shape, dtype)
        self._stop = start + torch.Size(shape).numel() * dtype.itemsize + GUARD

    def allocate(self) -> None:
        """Make the buffer; every tensor starts as canaries."""
        whole = torch.full((self._stop + 64,), CANARY, dtype=torch.uint8)
        skip = -whole.data_ptr() % 64
        self._bytes = whole[skip : skip + self._stop]

    def clone(self) -> Memory:
        """Equal memory elsewhere, with the same alignment of every tensor."""
        new = copy.copy(self)
        new.allocate()
        new._bytes.copy_(self._bytes)
        return new

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._places)

    def __getitem__(self, name: str) -> Tensor:
        start, shape, dtype = self._places[name]
        return self._bytes[start : start + torch.Size(shape).numel() * dtype.itemsize].view(dtype).view(shape)

    def damaged(self) -> list[str]:
        """Tensors behind which, or before the first of which, a canary died."""
        alive = self._bytes == CANARY
        found = []
        at, before = 0, "start"
        for name, (start, shape, dtype) in self._places.items():
            if not alive[at:start].all():
                found.append(before)
            at, before = start + torch.Size(shape).numel() * dtype.itemsize, name
        if not alive[at:].all():
            found.append(before)
        return found


class Bed:
    """A bucket with everything that passes read or write, filled with plausible random values.

    Segments differ: some have no gradient (their number is 3 modulo 5), a parameter of zeros (2 modulo 7), no momentum
    (4 modulo 7). With masks, as in compression, a tenth of the elements never saw a gradient, a tenth is masked by the
    user, and all of a segment with number 5 modulo 6.

    Attributes:
        case: what was asked for.
        layout: the bucket's place; blocks: its block map.
        params, grads: address tables of memory["param.i"] and memory["grad.i"].
        copies: None; or, where parameters are not fp32, the table of memory["copy.i"], whose masters params are.
        missing: numbers of the segments without gradient; a change of it counts from the next clone on.
        memory: all tensors by name.
    """

    def __init__(self, case: Case, masks: bool = False, seed: int = 0) -> None:
        self.case = case
        self.layout = _plan(case)
        self.blocks = block_map(self.layout, case.block, CPU)
        self.missing = frozenset(i for i in range(self.blocks.segments) if i % 5 == 3)
        self.grad_dtype = case.grad_dtype or case.dtype
        self.memory = Memory()
        self._reserve()
        self.memory.allocate()
        self._fill_tables(torch.Generator().manual_seed(seed))
        self._fill_state(torch.Generator().manual_seed(seed + 1), masks)
        self._fill_wire(torch.Generator().manual_seed(seed + 2))
        self._point()

    @property
    def elements(self) -> int:
        """Elements of the bucket, padding included."""
        return self.blocks.blocks * self.case.block

    @property
    def parameters(self) -> set[str]:
        """What an update of the parameters writes."""
        return {"param"} if self.copies is None else {"param", "copy"}

    @property
    def chunk_blocks(self) -> int:
        """Blocks of one chunk."""
        return self.blocks.blocks // self.case.ranks

    @property
    def segments(self) -> range:
        """Numbers of the segments."""
        return range(self.blocks.segments)

    def __getitem__(self, name: str) -> Tensor:
        if name.endswith(":planes"):
            return planes(self.memory[name.removesuffix(":planes")])
        return self.memory[name]

    def clone(self) -> Bed:
        """An equal bed in memory of its own."""
        new = copy.copy(self)
        new.memory = self.memory.clone()
        new._point()
        return new

    def part(self) -> Tensor:
        """Elements that take part in compression, bool [elements]."""
        return self["exp_avg_sq"] > 0

    def inside(self) -> Tensor:
        """Elements that are not padding, bool [elements]."""
        out = torch.zeros(self.elements, dtype=torch.bool)
        for start, size in zip(self.blocks.starts, self.blocks.sizes, strict=True):
            out[start : start + size] = True
        return out

    def flat(self, prefix: str) -> Tensor:
        """Parameters ("param") or gradients ("grad") as fp32 [elements], zeros where there is none."""
        out = torch.zeros(self.elements)
        for i, (start, size) in enumerate(zip(self.blocks.starts, self.blocks.sizes, strict=True)):
            if prefix == "param" or i not in self.missing:
                out[start : start + size] = self[f"{prefix}.{i}"].float()
        return out

    def skip(self) -> Bed:
        """This bed, with the decision to skip the step."""
        self["decision"][Decision.SKIP] = 1
        return self

    def _reserve(self) -> None:
        case, blocks, add = self.case, self.blocks, self.memory.add
        message = (case.ranks, HEADER_BYTES + self.chunk_blocks * case.block // 8)
        for i, size in enumerate(blocks.sizes):
            add(f"param.{i}", (size,), torch.float32, case.shift)
            if case.dtype != torch.float32:
                add(f"copy.{i}", (size,), case.dtype, case.shift)
            add(f"grad.{i}", (size,), self.grad_dtype, case.shift)
        for name in ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh", "x"):
            add(name, (self.elements,), torch.float32)
        add("averaged", (self.elements,), self.grad_dtype)
        add("y", (self.elements // case.ranks,), torch.float32)
        for name in ("old", "new", "received"):
            add(name, message, torch.uint8)
        add("message", message[1:], torch.uint8)
        for name in ("x_scale", "y_scale", "count", "chunk_count"):
            add(name, (1,), torch.float32)
        add("tag", (1,), torch.int32)
        add("stamp", (len(Stamp),), torch.int32)
        add("roll", (case.ranks, len(Roll)), torch.float32)
        add("norms", (blocks.blocks,), torch.float32)
        add("partials2", (2, blocks.blocks), torch.float32)
        add("partials4", (4, blocks.blocks), torch.float32)
        add("chunk_partials", (self.chunk_blocks,), torch.float32)
        add("hyper", (blocks.segments, len(Hyper)), torch.float32)
        add("rates", (blocks.segments, len(Rate)), torch.float32)
        add("clip", (len(Clip),), torch.float32)
        add("decision", (len(Decision),), torch.int32)

    def _point(self) -> None:
        self.params = TensorTable(self.blocks.segments, torch.float32, CPU)
        self.grads = TensorTable(self.blocks.segments, self.grad_dtype, CPU)
        self.params.set([self[f"param.{i}"] for i in self.segments])
        self.copies: TensorTable | None = None
        if self.case.dtype != torch.float32:
            self.copies = TensorTable(self.blocks.segments, self.case.dtype, CPU)
            self.copies.set([self[f"copy.{i}"] for i in self.segments])
        self.grads.set([None if i in self.missing else self[f"grad.{i}"] for i in self.segments])

    def _fill_tables(self, random: torch.Generator) -> None:
        for i in self.segments:
            self["hyper"][i] = hyper_row(self.case, i)
        low, high = torch.ones(len(Rate)), torch.ones(len(Rate))
        for column, start, stop in (
            (Rate.STEP, 5, 6), (Rate.COEFF, 0.1, 2), (Rate.COEFF_CORRECTION, 0.3, 1), (Rate.CORRECTION1, 0.4, 1),
            (Rate.CORRECTION2, 0.01, 1), (Rate.SCALING, 0.3, 20), (Rate.FACTOR, 0.6, 3), (Rate.COEFF_USED, 0, 1),
            (Rate.RATE, 0.001, 0.1),
        ):  # fmt: skip
            low[column], high[column] = start, stop
        self["rates"].copy_(low + (high - low) * torch.rand(self["rates"].shape, generator=random))
        self["rates"][:, Rate.STEP] = 5.0
        self["clip"].copy_(torch.tensor([self.case.grad_scale, 0.8, 0.5, 1.0, 1.0]))
        self["decision"].copy_(torch.tensor([0, 7, 2, 0, -1, 0, 3, 1, 0], dtype=torch.int32))
        self["tag"].fill_(0x1234567)
        self["stamp"].copy_(torch.tensor([1, 0x7654321]))
        self["roll"].fill_(3.0)[:, Roll.FAILED] = 0.0

    def _fill_state(self, random: torch.Generator, masks: bool) -> None:
        def normal(size: int) -> Tensor:
            return torch.randn(size, generator=random)

        inside = self.inside()
        v = normal(self.elements).square() * 1e-4
        if masks:
            choice = torch.rand(self.elements, generator=random)
            v = torch.where(choice < 0.1, torch.zeros_like(v), torch.where(choice < 0.2, -v, v))
        m = normal(self.elements) * 1e-2
        for i, (start, size) in enumerate(zip(self.blocks.starts, self.blocks.sizes, strict=True)):
            self[f"param.{i}"].copy_(normal(size) * (0.0 if i % 7 == 2 else 0.5))
            if self.case.dtype != torch.float32:
                self[f"copy.{i}"].copy_(self[f"param.{i}"])
            self[f"grad.{i}"].copy_(normal(size) * (0.0 if i % 7 == 4 else 0.1))
            if i % 7 == 4:
                m[start : start + size] = 0.0
                self["rates"][i, Rate.SCALING] = 1.0
            if masks and i % 6 == 5:
                v[start : start + size] = -v[start : start + size].abs()
        v = torch.where(inside, v, torch.zeros_like(v))
        part = v > 0 if masks else inside
        zero = torch.zeros_like(v)
        self["exp_avg"].copy_(torch.where(part, m, zero))
        self["exp_avg_sq"].copy_(v)
        self["exp_avg_sq_fresh"].copy_(torch.where(part, normal(self.elements).square() * 1e-4, v))
        counts = part.view(self.blocks.blocks, -1).sum(1)
        self["rates"][:, Rate.COUNT] = self.blocks.sum(counts.double()).float()
        self["count"].fill_(counts.sum())
        self["chunk_count"].fill_(counts[: self.chunk_blocks].sum())
        for name, scale in (("x", 0.02), ("y", 0.015)):
            self[f"{name}_scale"].fill_(scale)
            value = normal(self.elements) * scale
            value[::5] = scale  # leaves an error of exactly zero
            value[1::7] = -scale
            value[2::11] = 0.0
            value = torch.where(part, value, -zero)
            self[name].copy_(value[: self[name].numel()])

    def _fill_wire(self, random: torch.Generator) -> None:
        for name in ("old", "new", "received", "message"):
            messages = self[name].view(-1, self["message"].numel())
            messages.copy_(torch.randint(0, 256, messages.shape, generator=random, dtype=torch.uint8))
            header(messages, Header.SCALE).copy_(0.01 + 0.01 * torch.rand(messages.shape[0], generator=random))
            header(messages, Header.FLAGS).zero_()
            header(messages, Header.SQUARES).fill_(1.5)
            header(messages, Header.TAG).copy_(self["tag"])
            header(messages, Header.STEP).copy_(self["decision"][[Decision.COUNTED, Decision.SKIPPED]].sum())
            header(messages, Header.SETTINGS).copy_(self["stamp"][Stamp.SETTINGS])
            header(messages, Header.SENDER).copy_(torch.arange(messages.shape[0]))
            balance(messages)


def _plan(case: Case) -> BucketLayout:
    tensors = [torch.empty(size, dtype=case.dtype) for size in case.sizes]
    buckets = plan_layout(tensors, case.block, 1 << 30, case.ranks).buckets
    assert len(buckets) == 1
    return buckets[0]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits, all NaN counting as one."""
    if a.dtype.is_floating_point:
        bits = {2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
        return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())
    return torch.equal(a, b)


Run = Callable[[Passes, Bed], None]


def check(
    bed: Bed,
    run: Run,
    written: Iterable[str],
    rounded: Iterable[str] = (),
    overwritten: Iterable[str] = (),
) -> tuple[Bed, Bed]:
    """Run a pass with kernel and twin on copies of a bed, and hold the two together.

    Args:
        bed: inputs, left alone.
        run: calls the pass.
        written: tensors, or the part of their names before the dot, that must change; all others must not.
        rounded: those of them that agree to rounding instead of bitwise.
        overwritten: those of them whose old content must not matter: filled with canaries or garbage first. A name
            that ends in ":planes" stands for messages without their headers.

    Returns:
        The beds that the kernel and the twin have worked on.
    """
    kernel, twin = bed.clone(), bed.clone()
    for copied, passes, byte in ((kernel, TRITON, CANARY), (twin, TORCH, GARBAGE)):
        for name in overwritten:
            copied[name].view(torch.uint8).fill_(byte)
        run(passes, copied)
        assert not copied.memory.damaged(), f"{passes.name} wrote behind {copied.memory.damaged()}"
    changed = set()
    for name in bed.memory.names:
        group = name.partition(".")[0]
        if name in rounded:
            assert_near(name, kernel[name], twin[name])
        else:
            assert same_bits(kernel[name], twin[name]), f"{name}: {describe(kernel[name], twin[name])}"
        if not same_bits(kernel[name], bed[name]):
            changed.add(group)
    assert changed == set(written)
    return kernel, twin


def assert_near(name: str, kernel: Tensor, twin: Tensor) -> None:
    """Equal to rounding; of messages only the two floats of their headers may be rounded, and so their balance."""
    if kernel.dtype == torch.uint8:
        kernel, twin = kernel.view(-1, kernel.shape[-1]).clone(), twin.view(-1, twin.shape[-1]).clone()
        for messages in (kernel, twin):
            assert not check_sum(messages).any()
            header(messages, Header.CHECK).zero_()
        for field in (Header.SCALE, Header.SQUARES):
            assert_near(f"header {field} of {name}", header(kernel, field), header(twin, field))
            header(kernel, field).copy_(header(twin, field))
        assert same_bits(kernel, twin), f"{name}: {describe(kernel, twin)}"
    else:
        torch.testing.assert_close(kernel, twin, rtol=RTOL, atol=0, equal_nan=True, msg=lambda text: f"{name}: {text}")


def check_unchanged(bed: Bed, run: Run) -> None:
    """Run a pass with kernel and twin on copies of a bed: not one bit changes."""
    for passes in (TRITON, TORCH):
        copied = bed.clone()
        run(passes, copied)
        assert not copied.memory.damaged()
        changed = [name for name in bed.memory.names if not same_bits(copied[name], bed[name])]
        assert changed == [], passes.name


def describe(a: Tensor, b: Tensor) -> str:
    """Where two tensors differ first."""
    at = int((a.flatten() != b.flatten()).nonzero()[0])
    return f"element {at}: {a.flatten()[at].item()!r} is not {b.flatten()[at].item()!r}"


def numpy_planes(x: Tensor, block: int) -> np.ndarray:
    """The wire format, word for word: bit k of byte j in a block is 1 where element k Q + j is not negative."""
    quarter = block // 8
    out = np.zeros(x.numel() // 8, dtype=np.uint8)
    for at, value in enumerate(x.tolist()):
        number, inside = divmod(at, block)
        k, j = divmod(inside, quarter)
        if not value < 0:
            out[number * quarter + j] |= 1 << k
    return out
