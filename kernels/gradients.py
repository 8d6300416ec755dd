"""Passes over gradients alone: copying them into one flat buffer for averaging, and their norms."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from .common import (
    TRITON_DTYPES,
    kernel,
    launch_constants,
    load_segment,
    require,
    segment_of_block,
    tile_elements,
)
from .tables import BlockMap, TensorTable


@kernel
def _flatten_gradients_kernel(
    grad_ptr, segment_ptr, first_block_ptr, numel_ptr, out_ptr,
    RANKS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    segment, offset, remaining = segment_of_block(segment_ptr, first_block_ptr, numel_ptr, block, BLOCK)
    address = tl.load(grad_ptr + segment)
    for start in tl.static_range(0, BLOCK, TILE):
        i = start + tl.arange(0, TILE)
        g = load_segment(address, offset, i, remaining, BLOCK, DTYPE, ALIGNED)
        g = tl.div_rn(g, tl.full([TILE], RANKS, tl.float32))
        tl.store(out_ptr + block * BLOCK + i, g.to(out_ptr.dtype.element_ty))


@kernel
def _gradient_norms_kernel(
    grad_ptr, segment_ptr, first_block_ptr, numel_ptr, partials_ptr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    segment, offset, remaining = segment_of_block(segment_ptr, first_block_ptr, numel_ptr, block, BLOCK)
    address = tl.load(grad_ptr + segment)
    squares = tl.zeros([TILE], tl.float32)
    for start in tl.static_range(0, BLOCK, TILE):
        i = start + tl.arange(0, TILE)
        g = load_segment(address, offset, i, remaining, BLOCK, DTYPE, ALIGNED)
        squares += g * g
    tl.store(partials_ptr + block, tl.sum(squares))


def flatten_gradients(grads: TensorTable, blocks: BlockMap, out: Tensor, ranks: int) -> None:
    """Copy all gradients of a bucket, divided by the number of ranks, into one flat buffer.

    Args:
        grads: gradients of the bucket's segments; missing ones count as zero.
        blocks: the bucket's block map.
        out: fp32, bf16 or fp16 [blocks * block_elements]; padding becomes zero.
        ranks: what to divide by (in fp32, then rounded), so that a sum over ranks is the mean.
    """
    block = blocks.block_elements
    if out.dtype not in TRITON_DTYPES:
        raise ValueError(f"Invalid out: its dtype must be one of {[*map(str, TRITON_DTYPES)]}, got {out.dtype}.")
    require("out", out, out.dtype, blocks.blocks * block, grads.addresses.device)
    _flatten_gradients_kernel[(blocks.blocks,)](
        grads.addresses, blocks.segment, blocks.first_block, blocks.numel, out,
        ranks, block, tile_elements(block), TRITON_DTYPES[grads.dtype], grads.aligned, **launch_constants(block),
    )  # fmt: skip


def gradient_norms(grads: TensorTable, blocks: BlockMap, partials: Tensor) -> None:
    """Sum of squares of the gradients of every block.

    Args:
        grads: gradients of the bucket's segments; missing ones count as zero.
        blocks: the bucket's block map.
        partials: fp32 [blocks], overwritten; inf or NaN where a gradient, or its square, is not finite.
    """
    block = blocks.block_elements
    require("partials", partials, torch.float32, blocks.blocks, grads.addresses.device)
    _gradient_norms_kernel[(blocks.blocks,)](
        grads.addresses, blocks.segment, blocks.first_block, blocks.numel, partials,
        block, tile_elements(block), TRITON_DTYPES[grads.dtype], grads.aligned, **launch_constants(block),
    )  # fmt: skip
