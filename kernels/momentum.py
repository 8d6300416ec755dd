"""Stage 2, worker: momentum, error compensation and sign planes in one pass over a bucket.

    x = (b1 m + (1-b1) g) s_j + e,  S = |x| / sqrt(N),  planes = sign(x)

The error is lazy: x stays where it is, and e = x - S sign(x) is formed when x is next read; the signs do not depend on
the scale, so one pass is enough. The momentum is read from the signs and scales that the last exchange left behind, or
from a dense tensor in the first compressed step. Elements whose x is negative zero never take part.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from .common import (
    BETA1,
    DAMAGED,
    GRAD_SCALE,
    HYPERS,
    ONE_MINUS_BETA1,
    RATES,
    REDUCE_TILE,
    SCALING,
    SKIP,
    TRITON_DTYPES,
    block_of_messages,
    is_masked,
    keep_mask,
    kernel,
    launch_constants,
    lazy_error,
    load_scale,
    load_segment,
    planes_at_once,
    require,
    require_bucket,
    require_messages,
    require_seal,
    seal,
    segment_of_block,
    signed,
    sum_range,
)
from .tables import BlockMap, Fault, TensorTable

_NONFINITE = tl.constexpr(int(Fault.NONFINITE))


@kernel
def _compress_momentum_kernel(
    grad_ptr, segment_ptr, first_block_ptr, numel_ptr, x_ptr, x_scale_ptr, old_messages_ptr, exp_avg_ptr, hyper_ptr,
    rates_ptr, clip_ptr, new_messages_ptr, partials_ptr, blocks, blocks_per_chunk, message_bytes, L1: tl.constexpr,
    DENSE: tl.constexpr, BLOCK: tl.constexpr, PLANES: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0).to(tl.int64)
    segment, offset, remaining = segment_of_block(segment_ptr, first_block_ptr, numel_ptr, block, BLOCK)
    hyper = hyper_ptr + segment * HYPERS
    beta1, one_minus_beta1 = tl.load(hyper + BETA1), tl.load(hyper + ONE_MINUS_BETA1)
    scaling = tl.load(rates_ptr + segment * RATES + SCALING)
    grad_scale = tl.load(clip_ptr + GRAD_SCALE)
    x_scale = tl.load(x_scale_ptr)
    grad = tl.load(grad_ptr + segment)
    x_block = x_ptr + block * BLOCK
    PLANE: tl.constexpr = BLOCK // 8
    j = tl.arange(0, PLANE)[None, :]
    new_planes, _ = block_of_messages(new_messages_ptr, block, blocks_per_chunk, message_bytes, BLOCK)
    old_planes, old_message = block_of_messages(old_messages_ptr, block, blocks_per_chunk, message_bytes, BLOCK)
    if not DENSE:
        old = tl.load(old_planes + j).to(tl.int32)
        m_scale = tl.div_rn(load_scale(old_message), scaling)
    packed = tl.zeros([1, PLANE], tl.int32)
    sizes = tl.zeros([1, PLANE], tl.float32)
    g_squares = tl.zeros([1, PLANE], tl.float32)
    for first in tl.static_range(0, 8, PLANES):
        k = first + tl.arange(0, PLANES)[:, None]
        i = k * PLANE + j
        g = load_segment(grad, offset, i, remaining, BLOCK, DTYPE, ALIGNED) * grad_scale
        squares = g * g
        g_squares += tl.sum(squares, axis=0, keep_dims=True)
        g = tl.where(squares < float("inf"), g, 0.0)
        if DENSE:
            m = tl.load(exp_avg_ptr + block * BLOCK + i)
        else:
            m = signed(old, k, m_scale)
        x_old = tl.load(x_block + i)
        x = (beta1 * m + one_minus_beta1 * g) * scaling + lazy_error(x_old, x_scale)
        x = keep_mask(is_masked(x_old), x_old, x)
        tl.store(x_block + i, x)
        sizes += tl.sum(tl.abs(x) if L1 else x * x, axis=0, keep_dims=True)
        packed |= tl.sum((x >= 0).to(tl.int32) << k, axis=0, keep_dims=True)
    tl.store(new_planes + j, packed.to(tl.uint8))
    tl.store(partials_ptr + block, tl.sum(sizes))
    tl.store(partials_ptr + blocks + block, tl.sum(g_squares))


@kernel
def _seal_worker_kernel(
    partials_ptr, count_ptr, tag_ptr, stamp_ptr, decision_ptr, messages_ptr, x_scale_ptr, blocks, message_bytes,
    L1: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    message = tl.program_id(0).to(tl.int64)
    sizes = sum_range(partials_ptr, 0, blocks, TILE)
    g_squares = sum_range(partials_ptr + blocks, 0, blocks, TILE)
    finite = (sizes < float("inf")) & (g_squares < float("inf"))
    mean = tl.div_rn(sizes, tl.maximum(tl.load(count_ptr), 1.0))
    scale = mean if L1 else tl.sqrt_rn(mean)
    if message == 0:
        tl.store(x_scale_ptr, scale)
    flags = tl.where(finite, 0, _NONFINITE) | tl.load(decision_ptr + DAMAGED)
    seal(
        messages_ptr + message * message_bytes, scale, flags, g_squares, tag_ptr, stamp_ptr, decision_ptr,
        message_bytes // 4,
    )  # fmt: skip


@kernel
def _undo_momentum_kernel(
    grad_ptr, segment_ptr, first_block_ptr, numel_ptr, x_ptr, x_scale_ptr, old_messages_ptr, exp_avg_ptr, hyper_ptr,
    rates_ptr, clip_ptr, decision_ptr, blocks_per_chunk, message_bytes,
    DENSE: tl.constexpr, BLOCK: tl.constexpr, PLANES: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    if tl.load(decision_ptr + SKIP) == 0:
        return
    block = tl.program_id(0).to(tl.int64)
    segment, offset, remaining = segment_of_block(segment_ptr, first_block_ptr, numel_ptr, block, BLOCK)
    hyper = hyper_ptr + segment * HYPERS
    beta1, one_minus_beta1 = tl.load(hyper + BETA1), tl.load(hyper + ONE_MINUS_BETA1)
    scaling = tl.load(rates_ptr + segment * RATES + SCALING)
    grad_scale = tl.load(clip_ptr + GRAD_SCALE)
    grad = tl.load(grad_ptr + segment)
    x_block = x_ptr + block * BLOCK
    PLANE: tl.constexpr = BLOCK // 8
    j = tl.arange(0, PLANE)[None, :]
    if block == 0:
        tl.store(x_scale_ptr, 0.0)
    if not DENSE:
        old_planes, old_message = block_of_messages(old_messages_ptr, block, blocks_per_chunk, message_bytes, BLOCK)
        old = tl.load(old_planes + j).to(tl.int32)
        m_scale = tl.div_rn(load_scale(old_message), scaling)
    for first in tl.static_range(0, 8, PLANES):
        k = first + tl.arange(0, PLANES)[:, None]
        i = k * PLANE + j
        g = load_segment(grad, offset, i, remaining, BLOCK, DTYPE, ALIGNED) * grad_scale
        g = tl.where(g * g < float("inf"), g, 0.0)
        if DENSE:
            m = tl.load(exp_avg_ptr + block * BLOCK + i)
        else:
            m = signed(old, k, m_scale)
        x = tl.load(x_block + i)
        undone = x - (beta1 * m + one_minus_beta1 * g) * scaling
        tl.store(x_block + i, keep_mask(is_masked(x), x, undone))


def compress_momentum(
    grads: TensorTable,
    blocks: BlockMap,
    x: Tensor,
    x_scale: Tensor,
    old_messages: Tensor,
    exp_avg: Tensor | None,
    hyper: Tensor,
    rates: Tensor,
    clip: Tensor,
    new_messages: Tensor,
    partials: Tensor,
    l1: bool = False,
) -> None:
    """Form x in place, write its sign planes, and sum x^2 (or |x|) and g^2 of every block.

    A gradient element whose square is not finite counts as zero in x, but shows in the sum of squares.

    Args:
        grads: this rank's own gradients, missing ones count as zero.
        blocks: the bucket's block map.
        x: fp32 [blocks * block_elements], the last compensated momentum, overwritten by the new one.
        x_scale: fp32 [1], the scale it was sent with.
        old_messages: uint8 [ranks, message bytes], what the last exchange left: the momentum.
        exp_avg: None, or the dense momentum fp32 [blocks * block_elements] to read instead.
        hyper: fp32 [segments, len(Hyper)].
        rates: fp32 [segments, len(Rate)].
        clip: fp32 [len(Clip)]; gradients are multiplied by its GRAD_SCALE.
        new_messages: uint8 [ranks, message bytes]; the planes are overwritten, the headers are not.
        partials: fp32 [2, blocks], overwritten.
        l1: whether scales are means of absolute values, instead of roots of means of squares.
    """
    block, elements, device = blocks.block_elements, blocks.blocks * blocks.block_elements, x_scale.device
    ranks, message_bytes = new_messages.shape
    require_bucket(elements, device, x=x, exp_avg=exp_avg)
    require_messages(elements, device, old_messages=old_messages, new_messages=new_messages)
    require("partials", partials, torch.float32, 2 * blocks.blocks, device)
    _compress_momentum_kernel[(blocks.blocks,)](
        grads.addresses, blocks.segment, blocks.first_block, blocks.numel, x, x_scale, old_messages,
        x if exp_avg is None else exp_avg, hyper, rates, clip, new_messages, partials, blocks.blocks,
        blocks.blocks // ranks, message_bytes, l1, exp_avg is not None, block, planes_at_once(),
        TRITON_DTYPES[grads.dtype], grads.aligned, **launch_constants(block),
    )  # fmt: skip


def seal_worker(
    partials: Tensor, count: Tensor, tag: Tensor, stamp: Tensor, decision: Tensor, messages: Tensor, x_scale: Tensor,
    l1: bool = False,
) -> None:  # fmt: skip
    """Finish a worker's messages: the scale of x over the bucket, flags, |g|^2, and who sends what, in every header.

    Args:
        partials: fp32 [2, blocks], from `compress_momentum`; summed in a fixed order.
        count: fp32 [1], elements of the bucket that take part.
        tag: int32 [1], the bucket's layout tag.
        stamp: int32 [len(Stamp)].
        decision: int32 [len(Decision)], of the last step.
        messages: uint8 [ranks, message bytes], headers overwritten.
        x_scale: fp32 [1], overwritten.
        l1: as in `compress_momentum`.
    """
    ranks, message_bytes = messages.shape
    require_seal(partials.device, count, tag, stamp, decision, x_scale=x_scale)
    _seal_worker_kernel[(ranks,)](
        partials, count, tag, stamp, decision, messages, x_scale, partials.numel() // 2, message_bytes, l1,
        REDUCE_TILE, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def undo_momentum(
    grads: TensorTable,
    blocks: BlockMap,
    x: Tensor,
    x_scale: Tensor,
    old_messages: Tensor,
    exp_avg: Tensor | None,
    hyper: Tensor,
    rates: Tensor,
    clip: Tensor,
    decision: Tensor,
) -> None:
    """Take a skipped step back: x becomes the pending error with scale 0. The momentum has not changed.

    Does nothing if the step was not skipped. Arguments as in `compress_momentum`; decision is int32 [len(Decision)].
    """
    block, elements, device = blocks.block_elements, blocks.blocks * blocks.block_elements, decision.device
    ranks, message_bytes = old_messages.shape
    require_bucket(elements, device, x=x, exp_avg=exp_avg)
    require_messages(elements, device, old_messages=old_messages)
    _undo_momentum_kernel[(blocks.blocks,)](
        grads.addresses, blocks.segment, blocks.first_block, blocks.numel, x, x_scale, old_messages,
        x if exp_avg is None else exp_avg, hyper, rates, clip, decision,
        blocks.blocks // ranks, message_bytes, exp_avg is not None, block, planes_at_once(),
        TRITON_DTYPES[grads.dtype], grads.aligned, **launch_constants(block),
    )  # fmt: skip
