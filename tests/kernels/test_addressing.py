"""Offsets are 64-bit: kernels run the last blocks of tensors of billions of elements, of which only these exist.

A `Sparse` tensor has addresses of its own for all of its elements and memory for a few windows; loads and stores are
translated, and refused outside the windows. The interpreter also checks 32-bit integer arithmetic for overflow.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from onebit_triton import kernels
from onebit_triton.kernels.common import TRITON_DTYPES
from onebit_triton.kernels.tables import HEADER_BYTES, BlockMap, TensorTable

from .bed import CPU, RTOL, TORCH, TRITON, Bed, Case, same_bits

BLOCK = 64
PLANE = BLOCK // 8
LAST = 3
"""Blocks at the end of the bucket that exist; the last of them is not full."""

BACKWARDS = ("_lamb_apply_kernel", "_compressed_apply_kernel")
"""Kernels whose first programs own the last blocks."""

TRITON_TYPES = {**TRITON_DTYPES, torch.int32: tl.int32, torch.int64: tl.int64, torch.uint8: tl.uint8}


class Sparse:
    """A contiguous tensor of which only windows exist, as far as launchers and the interpreter look.

    Args:
        name: what errors call it.
        shape: its shape.
        windows: first element of each window, and the memory of the window.
    """

    made: list[Sparse] = []  # noqa: RUF012
    _REAL, _START, _ROOM = 1 << 57, 1 << 60, 1 << 44

    def __init__(self, name: str, shape: tuple[int, ...], *windows: tuple[int, Tensor]) -> None:
        self.name, self.shape, self.dtype, self.device = name, torch.Size(shape), windows[0][1].dtype, CPU
        self.windows = [(at * self.dtype.itemsize, tensor) for at, tensor in windows]
        for at, tensor in windows:
            assert tensor.is_contiguous()
            assert 0 <= at <= self.shape.numel() - tensor.numel()
        self.address = self._START + len(self.made) * self._ROOM
        self.made.append(self)

    def numel(self) -> int:
        return self.shape.numel()

    def is_contiguous(self) -> bool:
        return True

    def pointer(self) -> tl.tensor:
        """What a kernel gets for it."""
        dtype = tl.pointer_type(TRITON_TYPES[self.dtype])
        return tl.tensor(interpreter.TensorHandle(np.array([self.address], dtype=np.uint64), dtype), dtype)

    @classmethod
    def translate(cls, addresses: np.ndarray, mask: np.ndarray, size: int) -> np.ndarray:
        """Real addresses, for those in the mask."""
        real = addresses.copy()
        for i in np.ndindex(addresses.shape):
            address = int(addresses[i])
            if mask[i] and address >= cls._REAL:
                number, offset = divmod(address - cls._START, cls._ROOM)
                if not 0 <= number < len(cls.made):
                    raise AssertionError(f"access far outside of every tensor, at address {address:#x}")
                real[i] = cls.made[number]._real(offset, size)
        return real

    def _real(self, offset: int, size: int) -> int:
        for start, tensor in self.windows:
            if start <= offset and offset + size <= start + tensor.numel() * self.dtype.itemsize:
                return tensor.data_ptr() + offset - start
        raise AssertionError(f"access to {self.name} outside of its windows, at byte {offset}")


@pytest.fixture(autouse=True)
def giant(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sparse tensors work, only the programs of the last blocks of a large grid run, integer overflow is an error."""
    builder, function = interpreter.interpreter_builder, interpreter.InterpretedFunction
    load, store, run = builder.create_masked_load, builder.create_masked_store, function.run
    first = programs = 0

    def masked_load(ptrs: Any, mask: Any, other: Any, *policy: Any) -> Any:
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        real = Sparse.translate(ptrs.data, mask.data, size)
        return load(interpreter.TensorHandle(real, ptrs.dtype), mask, other, *policy)

    def masked_store(ptrs: Any, value: Any, mask: Any, *policy: Any) -> Any:
        size = ptrs.get_element_ty().primitive_bitwidth // 8
        real = Sparse.translate(ptrs.data, mask.data, size)
        return store(interpreter.TensorHandle(real, ptrs.dtype), value, mask, *policy)

    def program_id(axis: int) -> Any:
        return interpreter.TensorHandle(np.array([builder.grid_idx[axis] + first], dtype=np.int32), tl.int32)

    def num_programs(axis: int) -> Any:
        return interpreter.TensorHandle(np.array([programs], dtype=np.int32), tl.int32)

    def run_last(self: Any, *args: Any, grid: tuple[int, ...], **options: Any) -> Any:
        nonlocal first, programs
        programs = grid[0]
        count = min(LAST, programs)
        first = 0 if self.fn.__name__ in BACKWARDS else programs - count
        args = tuple(arg.pointer() if isinstance(arg, Sparse) else arg for arg in args)
        return run(self, *args, grid=(count,), **options)

    monkeypatch.setattr(builder, "create_masked_load", masked_load)
    monkeypatch.setattr(builder, "create_masked_store", masked_store)
    monkeypatch.setattr(builder, "create_get_program_id", program_id)
    monkeypatch.setattr(builder, "create_get_num_programs", num_programs)
    monkeypatch.setattr(builder, "options", interpreter.InterpreterOptions(debug=True, sanitize_overflow=True))
    monkeypatch.setattr(function, "run", run_last)
    yield
    Sparse.made.clear()


@dataclass(frozen=True)
class Scale:
    """Size of a bucket, and what no longer fits into 32 bits there."""

    ranks: int
    chunk_blocks: int

    @property
    def blocks(self) -> int:
        return self.ranks * self.chunk_blocks

    @property
    def message_bytes(self) -> int:
        return HEADER_BYTES + self.chunk_blocks * PLANE


MANY_BLOCKS = Scale(1, 2**25 + 2**20)  # the first element of a block
MANY_CHUNKS = Scale(4, 2**27 + 1)  # the start of a message, whose own size fits
LARGE_CHUNKS = Scale(2, 2**28 + 5)  # the place of a block in its message
SCALES = pytest.mark.parametrize("scale", [MANY_BLOCKS, MANY_CHUNKS, LARGE_CHUNKS], ids=["blocks", "chunks", "planes"])


class Giant:
    """A bucket of two tensors, a small one and an enormous one, and its end as a bed of its own.

    The twin works on a bed of the last blocks alone; the kernel on the enormous bucket, whose windows are a copy of it.
    """

    def __init__(self, scale: Scale, dtype: torch.dtype = torch.float32, masks: bool = True) -> None:
        self.scale = scale
        self.end = Bed(Case("end", (LAST * BLOCK - 27,), dtype=dtype), masks)
        self.kernel, self.before = self.end.clone(), self.end.clone()
        blocks, skipped = scale.blocks, scale.blocks - LAST
        self.first = skipped * BLOCK
        sizes = (BLOCK - 1, (skipped - 1) * BLOCK + self.end.blocks.sizes[0])
        self.blocks = BlockMap(
            segment=self.sparse("segment", (blocks,), (skipped, torch.ones(LAST, dtype=torch.int32))),
            first_block=torch.tensor([0, 1, blocks], dtype=torch.int32),
            numel=torch.tensor(sizes),
            sizes=sizes,
            starts=(0, BLOCK),
            block_elements=BLOCK,
        )
        self.params, self.grads = self.table("param.0", sizes[1]), self.table("grad.0", sizes[1])
        self.copies = None if self.end.copies is None else self.table("copy.0", sizes[1])
        self.hyper, self.rates = self.rows("hyper"), self.rows("rates")

    @staticmethod
    def sparse(name: str, shape: tuple[int, ...], *windows: tuple[int, Tensor]) -> Any:
        return Sparse(name, shape, *windows)

    def table(self, name: str, size: int) -> TensorTable:
        """Address table whose second tensor is enormous; nothing may touch the first."""
        end = self.kernel[name]
        table = TensorTable(2, end.dtype, CPU)
        small = self.sparse(f"small {name}", (BLOCK - 1,), (0, end[:0]))
        large = self.sparse(name, (size,), (size - end.numel(), end))
        table.addresses.copy_(torch.tensor([small.address, large.address]))
        return table

    def rows(self, name: str) -> Tensor:
        """Per-segment table, whose first row would spoil everything."""
        return torch.cat((torch.full_like(self.kernel[name], float("nan")), self.kernel[name]))

    def state(self, name: str) -> Any:
        """Flat state over the bucket."""
        return self.sparse(name, (self.scale.blocks * BLOCK,), (self.first, self.kernel[name]))

    def partials(self, name: str) -> Any:
        """Results per block."""
        rows = self.kernel[name]
        windows = [(row * self.scale.blocks + self.scale.blocks - LAST, rows[row]) for row in range(rows.shape[0])]
        return self.sparse(name, (rows.shape[0], self.scale.blocks), *windows)

    def messages(self, name: str, chunk: int = -1) -> Any:
        """Messages: the header of the last (or another) one, and its last planes."""
        memory, (ranks, size) = self.kernel[name], (self.scale.ranks, self.scale.message_bytes)
        start = (chunk % ranks) * size
        head, tail = memory.view(-1)[:HEADER_BYTES], memory.view(-1)[HEADER_BYTES:]
        return self.sparse(name, (ranks, size), (start, head), (start + size - tail.numel(), tail))

    def agree(self, *names: str, rounded: tuple[str, ...] = ()) -> None:
        """Kernel and twin left the same; exactly these tensors changed."""
        assert not self.kernel.memory.damaged()
        for name in self.end.memory.names:
            if name in rounded:
                torch.testing.assert_close(self.kernel[name], self.end[name], rtol=RTOL, atol=0)
            else:
                assert same_bits(self.kernel[name], self.end[name]), name
            assert same_bits(self.kernel[name], self.before[name]) == (name not in names + rounded), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_flatten_gradients(dtype: torch.dtype) -> None:
    giant = Giant(MANY_BLOCKS, dtype)
    TRITON.flatten_gradients(giant.grads, giant.blocks, giant.state("averaged"), 3)
    TORCH.flatten_gradients(giant.end.grads, giant.end.blocks, giant.end["averaged"], 3)
    giant.agree("averaged")


def test_gradient_norms() -> None:
    giant = Giant(MANY_BLOCKS)
    norms = giant.sparse("norms", (giant.scale.blocks,), (giant.scale.blocks - LAST, giant.kernel["norms"]))
    TRITON.gradient_norms(giant.grads, giant.blocks, norms)
    TORCH.gradient_norms(giant.end.grads, giant.end.blocks, giant.end["norms"])
    giant.agree(rounded=("norms",))


def test_lamb_moments() -> None:
    giant = Giant(MANY_BLOCKS, masks=False)
    end, shared = giant.end, giant.kernel
    TRITON.lamb_moments(
        giant.params, giant.grads, giant.blocks, giant.state("exp_avg"), giant.state("exp_avg_sq"), giant.hyper,
        giant.rates, shared["clip"], shared["decision"], giant.partials("partials2"), True,
    )  # fmt: skip
    TORCH.lamb_moments(
        end.params, end.grads, end.blocks, end["exp_avg"], end["exp_avg_sq"], end["hyper"], end["rates"], end["clip"],
        end["decision"], end["partials2"], True,
    )  # fmt: skip
    giant.agree("exp_avg", "exp_avg_sq", rounded=("partials2",))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lamb_apply(dtype: torch.dtype) -> None:
    giant = Giant(MANY_BLOCKS, dtype, masks=False)
    end = giant.end
    TRITON.lamb_apply(
        giant.params, giant.copies, giant.blocks, giant.state("exp_avg"), giant.state("exp_avg_sq"), giant.hyper,
        giant.rates, giant.kernel["decision"], True,
    )  # fmt: skip
    TORCH.lamb_apply(
        end.params, end.copies, end.blocks, end["exp_avg"], end["exp_avg_sq"], end["hyper"], end["rates"],
        end["decision"], True,
    )  # fmt: skip
    giant.agree("param.0", *["copy.0"] * (dtype != torch.float32))


@SCALES
@pytest.mark.parametrize("dense", [False, True], ids=["bits", "dense"])
def test_compress_momentum(scale: Scale, dense: bool) -> None:
    giant = Giant(scale)
    end, shared = giant.end, giant.kernel
    TRITON.compress_momentum(
        giant.grads, giant.blocks, giant.state("x"), shared["x_scale"], giant.messages("old"),
        giant.state("exp_avg") if dense else None, giant.hyper, giant.rates, shared["clip"], giant.messages("new"),
        giant.partials("partials2"),
    )  # fmt: skip
    TORCH.compress_momentum(
        end.grads, end.blocks, end["x"], end["x_scale"], end["old"], end["exp_avg"] if dense else None, end["hyper"],
        end["rates"], end["clip"], end["new"], end["partials2"],
    )  # fmt: skip
    giant.agree("x", "new", rounded=("partials2",))


@SCALES
@pytest.mark.parametrize("dense", [False, True], ids=["bits", "dense"])
def test_undo_momentum(scale: Scale, dense: bool) -> None:
    giant = Giant(scale)
    end, shared = giant.end, giant.kernel
    for bed in (end, shared):
        bed.skip()
    TRITON.undo_momentum(
        giant.grads, giant.blocks, giant.state("x"), shared["x_scale"], giant.messages("old"),
        giant.state("exp_avg") if dense else None, giant.hyper, giant.rates, shared["clip"], shared["decision"],
    )  # fmt: skip
    TORCH.undo_momentum(
        end.grads, end.blocks, end["x"], end["x_scale"], end["old"], end["exp_avg"] if dense else None, end["hyper"],
        end["rates"], end["clip"], end["decision"],
    )  # fmt: skip
    assert end["x_scale"].item() == 0.0
    shared["x_scale"].zero_()  # the first block of the bucket does it
    giant.agree("x", "x_scale", "decision")


@SCALES
@pytest.mark.parametrize("mode", ["bits", "dense", "uncompressed"])
def test_fresh_variance(scale: Scale, mode: str) -> None:
    giant = Giant(scale)
    end, shared = giant.end, giant.kernel
    TRITON.fresh_variance(
        giant.params, giant.grads if mode == "uncompressed" else None, giant.blocks, giant.messages("old"),
        giant.messages("new"), None if mode == "bits" else giant.state("exp_avg"), giant.state("exp_avg_sq"),
        giant.state("exp_avg_sq_fresh"), giant.hyper, giant.rates, shared["clip"], shared["decision"],
        giant.partials("partials4"), True,
    )  # fmt: skip
    TORCH.fresh_variance(
        end.params, end.grads if mode == "uncompressed" else None, end.blocks, end["old"], end["new"],
        None if mode == "bits" else end["exp_avg"], end["exp_avg_sq"], end["exp_avg_sq_fresh"], end["hyper"],
        end["rates"], end["clip"], end["decision"], end["partials4"], True,
    )  # fmt: skip
    giant.agree("exp_avg_sq_fresh", "exp_avg" if mode == "uncompressed" else "old", rounded=("partials4",))


@SCALES
@pytest.mark.parametrize("dense", [False, True], ids=["bits", "dense"])
def test_compressed_apply(scale: Scale, dense: bool) -> None:
    giant = Giant(scale)
    end = giant.end
    TRITON.compressed_apply(
        giant.params, giant.copies, giant.blocks, giant.messages("old"), giant.messages("new"),
        giant.state("exp_avg") if dense else None, giant.state("exp_avg_sq"), giant.hyper, giant.rates,
        giant.kernel["decision"], True,
    )  # fmt: skip
    TORCH.compressed_apply(
        end.params, end.copies, end.blocks, end["old"], end["new"], end["exp_avg"] if dense else None,
        end["exp_avg_sq"], end["hyper"], end["rates"], end["decision"], True,
    )  # fmt: skip
    if not dense:
        giant.kernel["old"][:, :HEADER_BYTES] = end["old"][:, :HEADER_BYTES]  # the first block of a chunk copies it
    giant.agree("param.0", *["old"] * (not dense))


def test_reduce_chunk() -> None:
    scale, ranks = LARGE_CHUNKS, 2
    end = Bed(Case("end", (ranks * LAST * BLOCK,), ranks=ranks), masks=True)
    shared, before = end.clone(), end.clone()
    size, blocks = scale.message_bytes, scale.chunk_blocks

    def windows(messages: Tensor) -> list[tuple[int, Tensor]]:
        heads = [(rank * size, message[:HEADER_BYTES]) for rank, message in enumerate(messages)]
        tails = [((rank + 1) * size - LAST * PLANE, message[HEADER_BYTES:]) for rank, message in enumerate(messages)]
        return heads + tails

    TRITON.reduce_chunk(
        Sparse("received", (ranks, size), *windows(shared["received"])),
        Sparse("y", (blocks * BLOCK,), ((blocks - LAST) * BLOCK, shared["y"])),
        shared["y_scale"], shared["decision"],
        Sparse("message", (size,), *windows(shared["message"].view(1, -1))),
        Sparse("partials", (blocks,), (blocks - LAST, shared["chunk_partials"])),
        BLOCK,
    )  # type: ignore[arg-type] # fmt: skip
    TORCH.reduce_chunk(
        end["received"], end["y"], end["y_scale"], end["decision"], end["message"], end["chunk_partials"], BLOCK
    )
    torch.testing.assert_close(shared["chunk_partials"], end["chunk_partials"], rtol=RTOL, atol=0)
    for name in end.memory.names:
        if name != "chunk_partials":
            assert same_bits(shared[name], end[name]), name
    for name in ("y", "message", "chunk_partials"):
        assert not same_bits(shared[name], before[name]), name


@pytest.mark.parametrize("stage", ["warmup", "compression"])
def test_rates_of_the_last_segments(stage: str) -> None:
    """Three tensors of a block each, behind one of 2**29 blocks."""
    blocks = 2**29 + LAST
    end = Bed(Case("end", (BLOCK,) * LAST), masks=True)
    name = "partials2" if stage == "warmup" else "partials4"
    end[name].copy_(torch.rand(end[name].shape, generator=torch.Generator().manual_seed(4)) + 0.5)
    shared = end.clone()
    rows = shared[name].shape[0]
    partials: Any = Sparse(
        name, (rows, blocks), *((row * blocks + blocks - LAST, shared[name][row]) for row in range(rows))
    )
    spoiled = torch.full_like(end["hyper"][:1], float("nan"))
    hyper = torch.cat((spoiled, end["hyper"]))
    rates = torch.cat((torch.full_like(end["rates"][:1], float("nan")), end["rates"]))
    giant = replace(
        end.blocks,
        segment=Sparse("segment", (blocks,), (0, torch.zeros(0, dtype=torch.int32))),  # type: ignore[arg-type]
        first_block=torch.tensor([0, *range(blocks - LAST, blocks + 1)], dtype=torch.int32),
        sizes=((blocks - LAST) * BLOCK, *end.blocks.sizes),
    )
    run: Callable[..., None] = TRITON.trust_ratio if stage == "warmup" else TRITON.soft_threshold_rate
    twin: Callable[..., None] = TORCH.trust_ratio if stage == "warmup" else TORCH.soft_threshold_rate
    run(giant, partials, hyper, rates, end["decision"])
    before = end["rates"].clone()
    twin(end.blocks, end[name], end["hyper"], end["rates"], end["decision"])
    torch.testing.assert_close(rates[1:], end["rates"], rtol=RTOL, atol=0)
    assert not same_bits(end["rates"], before)
    assert rates[0].isnan().all()


@triton.jit
def _scale_kernel(x_ptr, BLOCK: tl.constexpr, WIDE: tl.constexpr, BEYOND: tl.constexpr):
    block = tl.program_id(0)
    if WIDE:
        block = block.to(tl.int64)
    at = x_ptr + block * BLOCK + BEYOND + tl.arange(0, BLOCK)
    tl.store(at, tl.load(at) * 2)


def test_narrow_offsets_are_found() -> None:
    end = torch.arange(float(LAST * BLOCK))
    blocks = MANY_BLOCKS.blocks
    x: Any = Sparse("x", (blocks * BLOCK,), ((blocks - LAST) * BLOCK, end))
    with pytest.raises(InterpreterError, match="int32 overflow detected for operation mul"):
        _scale_kernel[(blocks,)](x, BLOCK, False, 0)
    assert end.tolist() == list(range(LAST * BLOCK))
    _scale_kernel[(blocks,)](x, BLOCK, True, 0)
    assert end.tolist() == list(range(0, 2 * LAST * BLOCK, 2))


def test_accesses_outside_of_the_windows_are_found() -> None:
    blocks = MANY_BLOCKS.blocks
    x: Any = Sparse("x", (blocks * BLOCK,), ((blocks - LAST) * BLOCK, torch.zeros(LAST * BLOCK)))
    for beyond in (-1, 1, -(2**32) // 4):
        with pytest.raises(InterpreterError, match="access to x outside of its windows"):
            _scale_kernel[(blocks,)](x, BLOCK, True, beyond)


def test_every_program_id_is_widened() -> None:
    """Also where nothing overflows yet."""
    found = 0
    for path in Path(kernels.__path__[0]).glob("*.py"):
        ids = re.findall(r"tl\.program_id\(\d\)(.*)", path.read_text())
        assert all(rest == ".to(tl.int64)" for rest in ids), path.name
        found += len(ids)
    assert found >= 10
