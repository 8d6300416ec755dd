"""Stage 2, every rank alike: the fresh variance, the soft-threshold layer rate, and the update.

    g~ = (m_new - b1 m) / (1-b1),  v' = b2 v' + (1-b2) g~ g~                            `fresh_variance`
    f = max (sqrt(v)+eps) / (sqrt(v')+eps), softened and clamped; rate = lr C f,        `soft_threshold_rate`
        at most lr max_rate_ratio clamp(|p| / |u|, min_coeff, max_coeff)
    p -= rate (m_new / (sqrt(v)+eps) + wd p)                                            `compressed_apply`

Only elements with v > 0 take part. An element that never saw a gradient has v = 0; one masked by the user has its v
stored negated, so that nothing of it is lost.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from .common import (
    BETA1,
    BETA2,
    COEFF,
    COEFF_BIAS_CORRECTION,
    COEFF_CORRECTION,
    COEFF_USED,
    COUNT,
    EPS,
    FACTOR,
    FACTOR_MAX,
    FACTOR_MIN,
    GRAD_SCALE,
    HEADER,
    HYPERS,
    LR,
    MAX_RATE_RATIO,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    RATE,
    RATES,
    REDUCE_TILE,
    SCALING,
    SKIP,
    STEP,
    THRESHOLD_HIGH,
    THRESHOLD_LOW,
    TRITON_DTYPES,
    UNCLIPPED,
    WEIGHT_DECAY,
    block_of_messages,
    bounded_trust_ratio,
    corrected,
    kernel,
    last_block_first,
    launch_constants,
    load_corrections,
    load_scale,
    load_segment,
    max_range,
    planes_at_once,
    require,
    require_bucket,
    require_messages,
    require_parameters,
    segment_of_block,
    signed,
    store_segment,
    sum_range,
)
from .tables import BlockMap, TensorTable


@kernel
def _fresh_variance_kernel(
    param_ptr, grad_ptr, segment_ptr, first_block_ptr, numel_ptr, old_messages_ptr, new_messages_ptr, exp_avg_ptr,
    exp_avg_sq_ptr, exp_avg_sq_fresh_ptr, hyper_ptr, rates_ptr, clip_ptr, decision_ptr, partials_ptr,
    blocks, blocks_per_chunk, message_bytes, BIAS_CORRECTION: tl.constexpr,
    OLD_DENSE: tl.constexpr, NEW_DENSE: tl.constexpr, BLOCK: tl.constexpr, PLANES: tl.constexpr,
    GRAD_DTYPE: tl.constexpr, PARAM_ALIGNED: tl.constexpr, GRAD_ALIGNED: tl.constexpr,
):  # fmt: skip
    if tl.load(decision_ptr + SKIP) != 0:
        return
    block = tl.program_id(0).to(tl.int64)
    segment, offset, remaining = segment_of_block(segment_ptr, first_block_ptr, numel_ptr, block, BLOCK)
    hyper = hyper_ptr + segment * HYPERS
    rates = rates_ptr + segment * RATES
    beta1, one_minus_beta1 = tl.load(hyper + BETA1), tl.load(hyper + ONE_MINUS_BETA1)
    beta2, one_minus_beta2 = tl.load(hyper + BETA2), tl.load(hyper + ONE_MINUS_BETA2)
    eps, weight_decay = tl.load(hyper + EPS), tl.load(hyper + WEIGHT_DECAY)
    correction1, correction2 = load_corrections(hyper, rates, False)
    scaling = tl.load(rates + SCALING)
    param = tl.load(param_ptr + segment)
    PLANE: tl.constexpr = BLOCK // 8
    j = tl.arange(0, PLANE)[None, :]
    if NEW_DENSE:
        grad = tl.load(grad_ptr + segment)
        grad_scale = tl.load(clip_ptr + GRAD_SCALE)
    else:
        old_planes, old_message = block_of_messages(old_messages_ptr, block, blocks_per_chunk, message_bytes, BLOCK)
        new_planes, new_message = block_of_messages(new_messages_ptr, block, blocks_per_chunk, message_bytes, BLOCK)
        new = tl.load(new_planes + j).to(tl.int32)
        new_scale = tl.div_rn(load_scale(new_message), scaling)
        direction_scale = corrected(new_scale, correction1, BIAS_CORRECTION)
        if not OLD_DENSE:
            changed = tl.load(old_planes + j).to(tl.int32) ^ new
            old_scale = beta1 * tl.div_rn(load_scale(old_message), scaling)
            g_kept = tl.div_rn(new_scale - old_scale, one_minus_beta1)
            g_changed = tl.div_rn(new_scale + old_scale, one_minus_beta1)
            g_kept, g_changed = g_kept * g_kept, g_changed * g_changed
        tl.store(old_planes + j, new.to(tl.uint8))
    factor = tl.zeros([1, PLANE], tl.float32)
    direction_squares = tl.zeros([1, PLANE], tl.float32)
    u_squares = tl.zeros([1, PLANE], tl.float32)
    p_squares = tl.zeros([1, PLANE], tl.float32)
    for first in tl.static_range(0, 8, PLANES):
        k = first + tl.arange(0, PLANES)[:, None]
        i = k * PLANE + j
        at = block * BLOCK + i
        v = tl.load(exp_avg_sq_ptr + at)
        v_fresh = tl.load(exp_avg_sq_fresh_ptr + at)
        part = v > 0
        if NEW_DENSE:
            g = load_segment(grad, offset, i, remaining, BLOCK, GRAD_DTYPE, GRAD_ALIGNED) * grad_scale
            squares = g * g
            finite = squares < float("inf")
            g, squares = tl.where(finite, g, 0.0), tl.where(finite, squares, 0.0)
            m = tl.where(part, beta1 * tl.load(exp_avg_ptr + at) + one_minus_beta1 * g, 0.0)
            tl.store(exp_avg_ptr + at, m)
            direction = corrected(m, correction1, BIAS_CORRECTION)
        else:
            direction = signed(new, k, direction_scale)
            if OLD_DENSE:
                g = tl.div_rn(signed(new, k, new_scale) - beta1 * tl.load(exp_avg_ptr + at), one_minus_beta1)
                squares = g * g
            else:
                squares = tl.where(((changed >> k) & 1) != 0, g_changed, g_kept)
        fresh = tl.where(part, beta2 * v_fresh + one_minus_beta2 * squares, v_fresh)
        tl.store(exp_avg_sq_fresh_ptr + at, fresh)
        denominator = tl.sqrt_rn(corrected(tl.abs(v), correction2, BIAS_CORRECTION)) + eps
        fresh_denominator = tl.sqrt_rn(corrected(tl.abs(fresh), correction2, BIAS_CORRECTION)) + eps
        ratio = tl.where(part, tl.div_rn(denominator, fresh_denominator), 0.0)
        factor = tl.maximum(factor, tl.max(ratio, axis=0, keep_dims=True))
        direction = tl.where(part, tl.div_rn(direction, denominator), 0.0)
        p = load_segment(param, offset, i, remaining, BLOCK, tl.float32, PARAM_ALIGNED)
        u = direction + weight_decay * p
        direction_squares += tl.sum(direction * direction, axis=0, keep_dims=True)
        u_squares += tl.sum(u * u, axis=0, keep_dims=True)
        p_squares += tl.sum(p * p, axis=0, keep_dims=True)
    tl.store(partials_ptr + block, tl.max(factor))
    tl.store(partials_ptr + blocks + block, tl.sum(direction_squares))
    tl.store(partials_ptr + 2 * blocks + block, tl.sum(u_squares))
    tl.store(partials_ptr + 3 * blocks + block, tl.sum(p_squares))


@kernel
def _soft_threshold_rate_kernel(
    first_block_ptr, partials_ptr, hyper_ptr, rates_ptr, decision_ptr, blocks, TILE: tl.constexpr
):
    if tl.load(decision_ptr + SKIP) != 0:
        return
    segment = tl.program_id(0).to(tl.int64)
    hyper = hyper_ptr + segment * HYPERS
    rates = rates_ptr + segment * RATES
    start, stop = tl.load(first_block_ptr + segment), tl.load(first_block_ptr + segment + 1)
    factor = max_range(partials_ptr, start, stop, TILE)
    direction_norm = tl.sqrt_rn(sum_range(partials_ptr + blocks, start, stop, TILE))
    u_norm = tl.sqrt_rn(sum_range(partials_ptr + 2 * blocks, start, stop, TILE))
    p_norm = tl.sqrt_rn(sum_range(partials_ptr + 3 * blocks, start, stop, TILE))
    share = tl.where(u_norm > 0, tl.minimum(tl.div_rn(direction_norm, u_norm), 1.0), 1.0)
    factor = tl.where(tl.load(hyper + WEIGHT_DECAY) > 0, factor * share + 1.0 - share, factor)
    takes_part = tl.load(rates + COUNT) > 0
    unclipped = tl.where(takes_part, factor, 1.0)
    factor = tl.minimum(tl.maximum(factor, tl.load(hyper + FACTOR_MIN)), tl.load(hyper + FACTOR_MAX))
    last = tl.load(rates + FACTOR)
    low, high = last * tl.load(hyper + THRESHOLD_LOW), last * tl.load(hyper + THRESHOLD_HIGH)
    factor = tl.minimum(tl.maximum(factor, low), high)
    factor = tl.where(takes_part, factor, 1.0)
    coeff = tl.load(rates + COEFF)
    correct = tl.load(hyper + COEFF_BIAS_CORRECTION) != 0
    coeff = tl.where(correct, tl.div_rn(coeff, tl.load(rates + COEFF_CORRECTION)), coeff)
    tl.store(rates + STEP, tl.load(rates + STEP) + 1.0)
    tl.store(rates + FACTOR, factor)
    _, trust = bounded_trust_ratio(p_norm, u_norm, hyper)
    used = tl.minimum(coeff * factor, tl.load(hyper + MAX_RATE_RATIO) * trust)
    tl.store(rates + COEFF_USED, used)
    tl.store(rates + RATE, tl.load(hyper + LR) * used)
    tl.store(rates + UNCLIPPED, unclipped)


@kernel
def _compressed_apply_kernel(
    param_ptr, copy_ptr, segment_ptr, first_block_ptr, numel_ptr, old_messages_ptr, new_messages_ptr, exp_avg_ptr,
    exp_avg_sq_ptr, hyper_ptr, rates_ptr, decision_ptr, blocks_per_chunk, message_bytes,
    BIAS_CORRECTION: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr, PLANES: tl.constexpr,
    PARAM_ALIGNED: tl.constexpr, COPY: tl.constexpr, COPY_DTYPE: tl.constexpr, COPY_ALIGNED: tl.constexpr,
):  # fmt: skip
    if tl.load(decision_ptr + SKIP) != 0:
        return
    block = last_block_first()
    segment, offset, remaining = segment_of_block(segment_ptr, first_block_ptr, numel_ptr, block, BLOCK)
    hyper = hyper_ptr + segment * HYPERS
    rates = rates_ptr + segment * RATES
    eps, weight_decay, rate = tl.load(hyper + EPS), tl.load(hyper + WEIGHT_DECAY), tl.load(rates + RATE)
    correction1, correction2 = load_corrections(hyper, rates, False)
    param = tl.load(param_ptr + segment)
    if COPY:
        copy = tl.load(copy_ptr + segment)
    PLANE: tl.constexpr = BLOCK // 8
    j = tl.arange(0, PLANE)[None, :]
    if not DENSE:
        planes, message = block_of_messages(new_messages_ptr, block, blocks_per_chunk, message_bytes, BLOCK)
        signs = tl.load(planes + j).to(tl.int32)
        m_scale = corrected(tl.div_rn(load_scale(message), tl.load(rates + SCALING)), correction1, BIAS_CORRECTION)
        if block % blocks_per_chunk == 0:
            head = tl.arange(0, HEADER)
            _, old_message = block_of_messages(old_messages_ptr, block, blocks_per_chunk, message_bytes, BLOCK)
            tl.store(old_message + head, tl.load(message + head))
    for first in tl.static_range(0, 8, PLANES):
        k = first + tl.arange(0, PLANES)[:, None]
        i = k * PLANE + j
        p = load_segment(param, offset, i, remaining, BLOCK, tl.float32, PARAM_ALIGNED)
        v = tl.load(exp_avg_sq_ptr + block * BLOCK + i)
        if DENSE:
            m = corrected(tl.load(exp_avg_ptr + block * BLOCK + i), correction1, BIAS_CORRECTION)
        else:
            m = signed(signs, k, m_scale)
        denominator = tl.sqrt_rn(corrected(tl.abs(v), correction2, BIAS_CORRECTION)) + eps
        u = tl.where(v > 0, tl.div_rn(m, denominator), 0.0) + weight_decay * p
        p -= rate * u
        store_segment(param, offset, i, remaining, p, BLOCK, tl.float32, PARAM_ALIGNED)
        if COPY:
            store_segment(copy, offset, i, remaining, p, BLOCK, COPY_DTYPE, COPY_ALIGNED)


def fresh_variance(
    params: TensorTable,
    grads: TensorTable | None,
    blocks: BlockMap,
    old_messages: Tensor,
    new_messages: Tensor,
    exp_avg: Tensor | None,
    exp_avg_sq: Tensor,
    exp_avg_sq_fresh: Tensor,
    hyper: Tensor,
    rates: Tensor,
    clip: Tensor,
    decision: Tensor,
    partials: Tensor,
    bias_correction: bool,
) -> None:
    """Move v' by the reconstructed gradient and reduce every block to max ratio, |up|^2, |u|^2 and |p|^2.

    The old momentum is read from old_messages or, if given, from exp_avg. The new one is read from new_messages, whose
    planes become those of old_messages, or, if gradients are given (one process, nothing compressed), formed from
    them and written to exp_avg. Where both are bits, g~^2 takes two values in a block: the sign changed, or not.

    Args:
        params: fp32 parameters of the bucket's segments, or their masters, read.
        grads: None, or this process's gradients.
        blocks: the bucket's block map.
        old_messages: uint8 [ranks, message bytes], what the last exchange left; planes overwritten.
        new_messages: likewise of this step's exchange, read.
        exp_avg: None, or the dense momentum fp32 [blocks * block_elements].
        exp_avg_sq: fp32 [blocks * block_elements], frozen; not positive where masked.
        exp_avg_sq_fresh: likewise, updated.
        hyper: fp32 [segments, len(Hyper)].
        rates: fp32 [segments, len(Rate)].
        clip: fp32 [len(Clip)]; gradients are multiplied by its GRAD_SCALE.
        decision: int32 [len(Decision)]; nothing changes if it says skip.
        partials: fp32 [4, blocks], overwritten.
        bias_correction: whether m and v are divided by 1 - beta^k, k steps of warmup.
    """
    require_parameters(params)
    block, elements, device = blocks.block_elements, blocks.blocks * blocks.block_elements, decision.device
    ranks, message_bytes = new_messages.shape
    require_bucket(elements, device, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq, exp_avg_sq_fresh=exp_avg_sq_fresh)
    if grads is None:
        require_messages(elements, device, old_messages=old_messages, new_messages=new_messages)
    require("partials", partials, torch.float32, 4 * blocks.blocks, device)
    source = params if grads is None else grads
    _fresh_variance_kernel[(blocks.blocks,)](
        params.addresses, source.addresses, blocks.segment, blocks.first_block, blocks.numel, old_messages,
        new_messages, exp_avg_sq if exp_avg is None else exp_avg, exp_avg_sq, exp_avg_sq_fresh, hyper, rates, clip,
        decision, partials, blocks.blocks, blocks.blocks // ranks, message_bytes, bias_correction, exp_avg is not None,
        grads is not None, block, planes_at_once(), TRITON_DTYPES[source.dtype], params.aligned, source.aligned,
        **launch_constants(block),
    )  # fmt: skip


def soft_threshold_rate(blocks: BlockMap, partials: Tensor, hyper: Tensor, rates: Tensor, decision: Tensor) -> None:
    """Factor f of every segment between its soft thresholds, and the step's rate, lr C f or its bound.

    Args:
        blocks: the bucket's block map.
        partials: fp32 [4, blocks], from `fresh_variance`; reduced in a fixed order.
        hyper: fp32 [segments, len(Hyper)].
        rates: fp32 [segments, len(Rate)], updated.
        decision: int32 [len(Decision)].
    """
    require("partials", partials, torch.float32, 4 * blocks.blocks, rates.device)
    _soft_threshold_rate_kernel[(blocks.segments,)](
        blocks.first_block, partials, hyper, rates, decision, blocks.blocks, REDUCE_TILE,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def compressed_apply(
    params: TensorTable,
    copies: TensorTable | None,
    blocks: BlockMap,
    old_messages: Tensor,
    new_messages: Tensor,
    exp_avg: Tensor | None,
    exp_avg_sq: Tensor,
    hyper: Tensor,
    rates: Tensor,
    decision: Tensor,
    bias_correction: bool,
) -> None:
    """p -= rate u, the momentum read from messages or, if given, from exp_avg.

    Walks backwards. The headers of new_messages become those of old_messages, which so hold this step's momentum:
    not before all of the bucket's variance passes, which read the old ones.

    Args:
        params: fp32 parameters of the bucket's segments, or their masters, updated in place; masked elements move by
            weight decay alone.
        copies: None, or the parameters whose masters these are; overwritten, rounded to their dtype.
        blocks: the bucket's block map.
        old_messages: uint8 [ranks, message bytes]; headers overwritten.
        new_messages: uint8 [ranks, message bytes], what this step's exchange left.
        exp_avg: None, or the dense momentum fp32 [blocks * block_elements].
        exp_avg_sq: fp32 [blocks * block_elements], frozen; not positive where masked.
        hyper: fp32 [segments, len(Hyper)].
        rates: fp32 [segments, len(Rate)], with the rates that `soft_threshold_rate` wrote.
        decision: int32 [len(Decision)].
        bias_correction: whether m and v are divided by 1 - beta^k, k steps of warmup.
    """
    require_parameters(params)
    block, elements, device = blocks.block_elements, blocks.blocks * blocks.block_elements, decision.device
    ranks, message_bytes = new_messages.shape
    require_bucket(elements, device, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    if exp_avg is None:
        require_messages(elements, device, old_messages=old_messages, new_messages=new_messages)
    copy = params if copies is None else copies
    _compressed_apply_kernel[(blocks.blocks,)](
        params.addresses, copy.addresses, blocks.segment, blocks.first_block, blocks.numel, old_messages, new_messages,
        exp_avg_sq if exp_avg is None else exp_avg, exp_avg_sq, hyper, rates, decision, blocks.blocks // ranks,
        message_bytes, bias_correction, exp_avg is not None, block, planes_at_once(), params.aligned,
        copies is not None, TRITON_DTYPES[copy.dtype], copy.aligned, **launch_constants(block),
    )  # fmt: skip
