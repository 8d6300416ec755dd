"""Stage 1, warmup: LAMB over a bucket in three launches, whatever the number of tensors.

`lamb_moments`: m = b1 m + (1-b1) g,  v = b2 v + (1-b2) g g,  u = m / (sqrt(v) + eps) + wd p
`trust_ratio`: c = clamp(|p| / |u|),  C = cb C + (1-cb) c
`lamb_apply`: p -= lr c u
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from .common import (
    BETA1,
    BETA2,
    COEFF,
    COEFF_BETA,
    COEFF_CORRECTION,
    COEFF_USED,
    CORRECTION1,
    CORRECTION2,
    EPS,
    GRAD_SCALE,
    HYPERS,
    LR,
    ONE_MINUS_BETA1,
    ONE_MINUS_BETA2,
    ONE_MINUS_COEFF_BETA,
    RATE,
    RATES,
    REDUCE_TILE,
    SKIP,
    STEP,
    TRITON_DTYPES,
    UNCLIPPED,
    WEIGHT_DECAY,
    bounded_trust_ratio,
    corrected,
    kernel,
    last_block_first,
    launch_constants,
    load_corrections,
    load_segment,
    require,
    require_bucket,
    require_parameters,
    segment_of_block,
    store_segment,
    sum_range,
    tile_elements,
)
from .tables import BlockMap, TensorTable


@kernel
def _lamb_moments_kernel(
    param_ptr, grad_ptr, segment_ptr, first_block_ptr, numel_ptr, exp_avg_ptr, exp_avg_sq_ptr, hyper_ptr, rates_ptr,
    clip_ptr, decision_ptr, partials_ptr, blocks,
    BIAS_CORRECTION: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr, PARAM_ALIGNED: tl.constexpr, GRAD_ALIGNED: tl.constexpr,
):  # fmt: skip
    if tl.load(decision_ptr + SKIP) != 0:
        return
    block = tl.program_id(0).to(tl.int64)
    segment, offset, remaining = segment_of_block(segment_ptr, first_block_ptr, numel_ptr, block, BLOCK)
    hyper = hyper_ptr + segment * HYPERS
    beta1, one_minus_beta1 = tl.load(hyper + BETA1), tl.load(hyper + ONE_MINUS_BETA1)
    beta2, one_minus_beta2 = tl.load(hyper + BETA2), tl.load(hyper + ONE_MINUS_BETA2)
    eps, weight_decay = tl.load(hyper + EPS), tl.load(hyper + WEIGHT_DECAY)
    correction1, correction2 = load_corrections(hyper, rates_ptr + segment * RATES, True)
    grad_scale = tl.load(clip_ptr + GRAD_SCALE)
    param, grad = tl.load(param_ptr + segment), tl.load(grad_ptr + segment)
    exp_avg = exp_avg_ptr + block * BLOCK
    exp_avg_sq = exp_avg_sq_ptr + block * BLOCK
    p_squares = tl.zeros([TILE], tl.float32)
    u_squares = tl.zeros([TILE], tl.float32)
    for start in tl.static_range(0, BLOCK, TILE):
        i = start + tl.arange(0, TILE)
        p = load_segment(param, offset, i, remaining, BLOCK, tl.float32, PARAM_ALIGNED)
        g = load_segment(grad, offset, i, remaining, BLOCK, GRAD_DTYPE, GRAD_ALIGNED) * grad_scale
        m = beta1 * tl.load(exp_avg + i) + one_minus_beta1 * g
        v = beta2 * tl.load(exp_avg_sq + i) + one_minus_beta2 * (g * g)
        denominator = tl.sqrt_rn(corrected(v, correction2, BIAS_CORRECTION)) + eps
        u = tl.div_rn(corrected(m, correction1, BIAS_CORRECTION), denominator) + weight_decay * p
        tl.store(exp_avg + i, m)
        tl.store(exp_avg_sq + i, v)
        p_squares += p * p
        u_squares += u * u
    tl.store(partials_ptr + block, tl.sum(p_squares))
    tl.store(partials_ptr + blocks + block, tl.sum(u_squares))


@kernel
def _trust_ratio_kernel(first_block_ptr, partials_ptr, hyper_ptr, rates_ptr, decision_ptr, blocks, TILE: tl.constexpr):
    if tl.load(decision_ptr + SKIP) != 0:
        return
    segment = tl.program_id(0).to(tl.int64)
    hyper = hyper_ptr + segment * HYPERS
    rates = rates_ptr + segment * RATES
    start, stop = tl.load(first_block_ptr + segment), tl.load(first_block_ptr + segment + 1)
    p_norm = tl.sqrt_rn(sum_range(partials_ptr, start, stop, TILE))
    u_norm = tl.sqrt_rn(sum_range(partials_ptr + blocks, start, stop, TILE))
    unclipped, c = bounded_trust_ratio(p_norm, u_norm, hyper)
    coeff_beta, one_minus_coeff_beta = tl.load(hyper + COEFF_BETA), tl.load(hyper + ONE_MINUS_COEFF_BETA)
    tl.store(rates + STEP, tl.load(rates + STEP) + 1.0)
    tl.store(rates + COEFF, coeff_beta * tl.load(rates + COEFF) + one_minus_coeff_beta * c)
    tl.store(rates + COEFF_CORRECTION, coeff_beta * tl.load(rates + COEFF_CORRECTION) + one_minus_coeff_beta)
    tl.store(
        rates + CORRECTION1, tl.load(hyper + BETA1) * tl.load(rates + CORRECTION1) + tl.load(hyper + ONE_MINUS_BETA1)
    )
    tl.store(
        rates + CORRECTION2, tl.load(hyper + BETA2) * tl.load(rates + CORRECTION2) + tl.load(hyper + ONE_MINUS_BETA2)
    )
    tl.store(rates + COEFF_USED, c)
    tl.store(rates + RATE, tl.load(hyper + LR) * c)
    tl.store(rates + UNCLIPPED, unclipped)


@kernel
def _lamb_apply_kernel(
    param_ptr, copy_ptr, segment_ptr, first_block_ptr, numel_ptr, exp_avg_ptr, exp_avg_sq_ptr, hyper_ptr, rates_ptr,
    decision_ptr, BIAS_CORRECTION: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, PARAM_ALIGNED: tl.constexpr,
    COPY: tl.constexpr, COPY_DTYPE: tl.constexpr, COPY_ALIGNED: tl.constexpr,
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
    for start in tl.static_range(0, BLOCK, TILE):
        i = start + tl.arange(0, TILE)
        p = load_segment(param, offset, i, remaining, BLOCK, tl.float32, PARAM_ALIGNED)
        m = tl.load(exp_avg_ptr + block * BLOCK + i)
        v = tl.load(exp_avg_sq_ptr + block * BLOCK + i)
        denominator = tl.sqrt_rn(corrected(v, correction2, BIAS_CORRECTION)) + eps
        u = tl.div_rn(corrected(m, correction1, BIAS_CORRECTION), denominator) + weight_decay * p
        p -= rate * u
        store_segment(param, offset, i, remaining, p, BLOCK, tl.float32, PARAM_ALIGNED)
        if COPY:
            store_segment(copy, offset, i, remaining, p, BLOCK, COPY_DTYPE, COPY_ALIGNED)


def lamb_moments(
    params: TensorTable,
    grads: TensorTable,
    blocks: BlockMap,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    hyper: Tensor,
    rates: Tensor,
    clip: Tensor,
    decision: Tensor,
    partials: Tensor,
    bias_correction: bool,
) -> None:
    """Move both moments and sum |p|^2 and |u|^2 of every block; nothing changes if the step is skipped.

    Args:
        params: fp32 parameters of the bucket's segments, or their masters, read.
        grads: averaged gradients, missing ones count as zero.
        blocks: the bucket's block map.
        exp_avg: fp32 [blocks * block_elements], updated.
        exp_avg_sq: likewise.
        hyper: fp32 [segments, len(Hyper)].
        rates: fp32 [segments, len(Rate)].
        clip: fp32 [len(Clip)]; gradients are multiplied by its GRAD_SCALE.
        decision: int32 [len(Decision)].
        partials: fp32 [2, blocks], overwritten.
        bias_correction: whether m and v are divided by 1 - beta^k.
    """
    require_parameters(params)
    block, elements, device = blocks.block_elements, blocks.blocks * blocks.block_elements, decision.device
    require_bucket(elements, device, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    require("partials", partials, torch.float32, 2 * blocks.blocks, device)
    _lamb_moments_kernel[(blocks.blocks,)](
        params.addresses, grads.addresses, blocks.segment, blocks.first_block, blocks.numel, exp_avg, exp_avg_sq,
        hyper, rates, clip, decision, partials, blocks.blocks, bias_correction, block, tile_elements(block),
        TRITON_DTYPES[grads.dtype], params.aligned, grads.aligned,
        **launch_constants(block),
    )  # fmt: skip


def trust_ratio(blocks: BlockMap, partials: Tensor, hyper: Tensor, rates: Tensor, decision: Tensor) -> None:
    """Trust ratio c of every segment, its running mean C, the bias corrections and the step's rate lr c.

    Args:
        blocks: the bucket's block map.
        partials: fp32 [2, blocks], from `lamb_moments`; summed in a fixed order.
        hyper: fp32 [segments, len(Hyper)].
        rates: fp32 [segments, len(Rate)], updated.
        decision: int32 [len(Decision)].
    """
    require("partials", partials, torch.float32, 2 * blocks.blocks, rates.device)
    _trust_ratio_kernel[(blocks.segments,)](
        blocks.first_block, partials, hyper, rates, decision, blocks.blocks, REDUCE_TILE,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def lamb_apply(
    params: TensorTable,
    copies: TensorTable | None,
    blocks: BlockMap,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    hyper: Tensor,
    rates: Tensor,
    decision: Tensor,
    bias_correction: bool,
) -> None:
    """p -= rate u, with u computed again from the moments. Walks backwards.

    Args:
        params: fp32 parameters of the bucket's segments, or their masters, updated in place.
        copies: None, or the parameters whose masters these are; overwritten, rounded to their dtype.
        blocks: the bucket's block map.
        exp_avg: fp32 [blocks * block_elements].
        exp_avg_sq: likewise.
        hyper: fp32 [segments, len(Hyper)].
        rates: fp32 [segments, len(Rate)], with the rates that `trust_ratio` wrote.
        decision: int32 [len(Decision)].
        bias_correction: whether m and v are divided by 1 - beta^k.
    """
    require_parameters(params)
    block, elements, device = blocks.block_elements, blocks.blocks * blocks.block_elements, decision.device
    require_bucket(elements, device, exp_avg=exp_avg, exp_avg_sq=exp_avg_sq)
    copy = params if copies is None else copies
    _lamb_apply_kernel[(blocks.blocks,)](
        params.addresses, copy.addresses, blocks.segment, blocks.first_block, blocks.numel, exp_avg, exp_avg_sq, hyper,
        rates, decision, bias_correction, block, tile_elements(block), params.aligned, copies is not None,
        TRITON_DTYPES[copy.dtype], copy.aligned,
        **launch_constants(block),
    )  # fmt: skip
