"""Where every parameter lies: segments in blocks, blocks in buckets, buckets in chunks; and the state in them.

Segments (parameter tensors) start on a block boundary; a bucket is padded to a multiple of blocks x ranks, so that
every rank serves an equal, contiguous chunk made of whole blocks. Tensors keep the order of `param_groups`; a bucket
holds one dtype, since a launch reads one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .kernels.tables import HEADER_BYTES, BlockMap, Rate, TensorTable

WIRE_VERSION = 2

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Parameter dtypes that can be optimised."""


@dataclass(frozen=True)
class BucketLayout:
    """Place of one bucket: its parameters (indices into the layout's list) and how many blocks each takes."""

    dtype: torch.dtype
    parameters: tuple[int, ...]
    sizes: tuple[int, ...]
    segment_blocks: tuple[int, ...]
    blocks: int


@dataclass(frozen=True)
class Layout:
    """Place of every non-empty parameter. Equal fingerprints mean that ranks can exchange messages.

    Attributes:
        block_elements: elements of a block.
        ranks: number of chunks of a bucket.
        buckets: the buckets, in order.
        fingerprint: 63-bit hash of sizes, dtypes, order, block size, ranks and wire version.
    """

    block_elements: int
    ranks: int
    buckets: tuple[BucketLayout, ...]
    fingerprint: int

    @property
    def elements(self) -> int:
        """Parameter elements, without padding."""
        return sum(sum(bucket.sizes) for bucket in self.buckets)

    @property
    def padded_elements(self) -> int:
        """Elements of all buckets, padding included."""
        return sum(bucket.blocks for bucket in self.buckets) * self.block_elements


def fingerprint(*facts: object) -> int:
    """63-bit hash of facts whose repr is the same on every machine."""
    digest = hashlib.sha256(repr(facts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def plan_layout(parameters: Sequence[Tensor], block_elements: int, bucket_elements: int, ranks: int) -> Layout:
    """Place parameters into buckets of about `bucket_elements`, in order; empty ones take no place.

    A tensor larger than a bucket gets a bucket of its own. Buckets of one dtype are filled in order.
    """
    open_buckets: dict[torch.dtype, list[int]] = {}
    filled: dict[torch.dtype, int] = {}
    members: list[list[int]] = []
    for index, parameter in enumerate(parameters):
        size = parameter.numel()
        if size == 0:
            continue
        dtype = parameter.dtype
        padded = -(-size // block_elements) * block_elements
        if dtype not in open_buckets or filled[dtype] + padded > bucket_elements:
            open_buckets[dtype] = []
            filled[dtype] = 0
            members.append(open_buckets[dtype])
        open_buckets[dtype].append(index)
        filled[dtype] += padded
    buckets = []
    for indices in members:
        sizes = tuple(parameters[i].numel() for i in indices)
        segment_blocks = tuple(-(-size // block_elements) for size in sizes)
        blocks = -(-sum(segment_blocks) // ranks) * ranks
        buckets.append(BucketLayout(parameters[indices[0]].dtype, tuple(indices), sizes, segment_blocks, blocks))
    facts = [(str(bucket.dtype), bucket.parameters, bucket.sizes, bucket.blocks) for bucket in buckets]
    return Layout(
        block_elements, ranks, tuple(buckets), fingerprint("wire", WIRE_VERSION, block_elements, ranks, facts)
    )


def block_map(layout: BucketLayout, block_elements: int, device: torch.device) -> BlockMap:
    """The block map of a bucket on a device. Blocks of padding are given to the last segment."""
    counts = torch.tensor(layout.segment_blocks)
    counts[-1] += layout.blocks - int(counts.sum())
    first_block = torch.zeros(len(layout.sizes) + 1, dtype=torch.int32)
    first_block[1:] = counts.cumsum(0)
    segment = torch.repeat_interleave(torch.arange(len(layout.sizes), dtype=torch.int32), counts)
    starts = tuple(int(first) * block_elements for first in first_block[:-1])
    return BlockMap(
        segment=segment.to(device),
        first_block=first_block.to(device),
        numel=torch.tensor(layout.sizes, dtype=torch.int64).to(device),
        sizes=layout.sizes,
        starts=starts,
        block_elements=block_elements,
    )


class Bucket:
    """State of one bucket. Tensors that a stage does not need are None; nothing else refers to them.

    Attributes:
        parameters: the parameters of its segments.
        layout: where they lie.
        map: the block map.
        params: table of the fp32 parameters, or of their masters; grads: table of the gradients.
        copies: None, or the table of the bf16 or fp16 parameters whose masters `params` has.
        master: None, or the masters, fp32 [elements].
        hyper, rates: this bucket's rows of the per-segment tables, fp32 [segments, columns].
        norms: this bucket's part of the gradients' sums of squares, fp32 [blocks].
        partials: fp32 [4, blocks], scratch for reductions.
        exp_avg: dense momentum, fp32 [elements]: in warmup, until the first compressed step has been taken, and
            always on one rank.
        exp_avg_sq: v, fp32 [elements]; in compression frozen, not positive where masked.
        exp_avg_sq_fresh: v', fp32 [elements], in compression.
        averaged: gradients being averaged, [elements], in warmup without DDP; of the dtype that is sent.
        x, x_scale: the worker's compensated momentum fp32 [elements] and its scale [1].
        y, y_scale: the server's sum fp32 [elements / ranks] and its scale [1].
        count, chunk_count: fp32 [1], elements that take part in the bucket and in this rank's chunk.
    """

    def __init__(
        self,
        layout: BucketLayout,
        parameters: Sequence[Tensor],
        block_elements: int,
        hyper: Tensor,
        rates: Tensor,
        norms: Tensor,
    ) -> None:
        device = hyper.device
        self.layout = layout
        self.parameters = list(parameters)
        self._planned = [_form(p) for p in parameters]
        self.map = block_map(layout, block_elements, device)
        self.params = TensorTable(len(parameters), torch.float32, device)
        self.grads = TensorTable(len(parameters), layout.dtype, device)
        self.hyper, self.rates, self.norms = hyper, rates, norms
        self.partials = torch.zeros(4, layout.blocks, dtype=torch.float32, device=device)
        self.copies: TensorTable | None = None
        self.master: Tensor | None = None
        if layout.dtype != torch.float32:
            self.copies = TensorTable(len(parameters), layout.dtype, device)
            self.master = self.zeros()
            self._masters = self.views(self.master)
            for view, parameter in zip(self._masters, parameters, strict=True):
                view.copy_(parameter.detach())
        self.note_written()
        self.exp_avg: Tensor | None = self.zeros()
        self.exp_avg_sq: Tensor = self.zeros()
        self.exp_avg_sq_fresh: Tensor | None = None
        self.averaged: Tensor | None = None
        self.x: Tensor | None = None
        self.y: Tensor | None = None
        self.x_scale, self.y_scale, self.count, self.chunk_count = torch.zeros(
            4, 1, dtype=torch.float32, device=device
        ).unbind(0)

    @property
    def elements(self) -> int:
        """Elements of the bucket, padding included."""
        return self.map.blocks * self.map.block_elements

    def zeros(self) -> Tensor:
        """New fp32 state over the bucket."""
        return torch.zeros(self.elements, dtype=torch.float32, device=self.hyper.device)

    def views(self, state: Tensor) -> list[Tensor]:
        """Views of flat state, one per parameter, with the parameter's shape and strides."""
        return [
            state[start : start + size].as_strided(p.shape, p.stride(), state.storage_offset() + start)
            for p, start, size in zip(self.parameters, self.map.starts, self.map.sizes, strict=True)
        ]

    def check_parameters(self, names: Sequence[str]) -> None:
        """Check that the parameters, whose data may have been replaced, still have the form they had.

        Raises:
            RuntimeError: naming the parameter: addresses alone would not show the change.
        """
        for parameter, planned, name in zip(self.parameters, self._planned, names, strict=True):
            if _form(parameter) != planned:
                raise RuntimeError(
                    f"Invalid {name}: shape, strides, dtype and device must stay as they were when the optimizer was "
                    f"built, {planned}, got {_form(parameter)}. Build a new optimizer."
                )

    def point_at_parameters(self) -> None:
        """Point the tables at today's parameters; masters follow what others have written to them since `note_written`.

        A master whose parameter still is its rounded value keeps the bits that the parameter cannot hold.
        """
        if self.master is None or self.copies is None:
            self.params.set(self.parameters)
            return
        for number, (parameter, view) in enumerate(zip(self.parameters, self._masters, strict=True)):
            if _contents(parameter) != self._written[number]:
                held = parameter.detach()
                view.copy_(torch.where(view.to(held.dtype) == held, view, held.to(view.dtype)))
        self.params.set(self._masters)
        self.copies.set(self.parameters)

    def note_written(self) -> None:
        """Take what the parameters hold now for what belongs to their masters."""
        if self.master is not None:
            self._written = [_contents(p) for p in self.parameters]

    def columns(self, column: Rate) -> Tensor:
        """One column of the layer table, fp32 [segments]."""
        return self.rates[:, column]

    def layer_sums(self, values: Tensor) -> Tensor:
        """Sum of flat values over each of the layers, fp64 [segments]."""
        return self.map.sum(values.view(self.map.blocks, -1).sum(1, dtype=torch.float64))

    def held(self) -> list[Tensor]:
        """Every tensor whose size grows with the parameters, scratch and maps included."""
        state = (
            self.partials,
            self.norms,
            self.map.segment,
            self.master,
            self.exp_avg,
            self.exp_avg_sq,
            self.exp_avg_sq_fresh,
            self.averaged,
            self.x,
            self.y,
        )
        return [tensor for tensor in state if tensor is not None]


def _form(tensor: Tensor) -> tuple[object, ...]:
    """What a launch takes for granted about a parameter."""
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _contents(tensor: Tensor) -> tuple[int, int]:
    """What differs once somebody has written to a tensor, or replaced its data."""
    return tensor.data_ptr(), tensor._version


def message_bytes(layout: BucketLayout, block_elements: int, ranks: int) -> int:
    """Bytes of one message: the header and one bit for each element of a chunk."""
    return HEADER_BYTES + layout.blocks * block_elements // ranks // 8


def memory_order_is_dense(tensor: Tensor) -> bool:
    """Whether a tensor fills its memory without gaps or overlaps, in whatever order of its dimensions."""
    if tensor.numel() == 0:
        return True
    shape = [(stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size != 1]
    expected = 1
    for stride, size in sorted(shape):
        if stride != expected:
            return False
        expected *= size
    return True


def gradient_like(parameter: Tensor, name: str) -> Tensor | None:
    """The gradient of a parameter in its memory order and dtype (a copy only where they differ), or None.

    Raises:
        RuntimeError: for a sparse gradient, or one on another device or of another shape.
    """
    grad = parameter.grad
    if grad is None:
        return None
    if grad.layout != torch.strided:
        raise RuntimeError(f"Invalid gradient of {name}: must be dense, got layout {grad.layout}.")
    if grad.device != parameter.device:
        raise RuntimeError(f"Invalid gradient of {name}: must be on {parameter.device}, got {grad.device}.")
    if grad.shape != parameter.shape:
        wanted, got = tuple(parameter.shape), tuple(grad.shape)
        raise RuntimeError(f"Invalid gradient of {name}: must have shape {wanted}, got {got}.")
    if grad.dtype == parameter.dtype and grad.stride() == parameter.stride():
        return grad
    return torch.empty_like(parameter).copy_(grad)
