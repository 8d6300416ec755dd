"""Plain-torch twins of variance.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .lamb_reference import commit, corrections, root
from .momentum_reference import finite_gradient, momentum_of_messages
from .tables import BlockMap, Hyper, Rate, TensorTable


def fresh_variance_reference(
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
) -> None:
    """Twin of `fresh_variance`."""
    shape = (blocks.blocks, blocks.block_elements)
    v, v_fresh = exp_avg_sq.view(shape), exp_avg_sq_fresh.view(shape)
    p = params.gather(blocks)
    part = v > 0
    zero = torch.zeros_like(v)
    beta1, one_minus_beta1 = blocks.rows(hyper, Hyper.BETA1), blocks.rows(hyper, Hyper.ONE_MINUS_BETA1)
    m_old = momentum_of_messages(blocks, old_messages, rates) if exp_avg is None else exp_avg.view(shape)
    if grads is None:
        m = torch.where(part, momentum_of_messages(blocks, new_messages, rates), zero)
        g = (m - beta1 * m_old) / one_minus_beta1
    else:
        g, _ = finite_gradient(grads, blocks, clip)
        m = torch.where(part, beta1 * m_old + one_minus_beta1 * g, zero)
    fresh = blocks.rows(hyper, Hyper.BETA2) * v_fresh + blocks.rows(hyper, Hyper.ONE_MINUS_BETA2) * (g * g)
    fresh = torch.where(part, fresh, v_fresh)
    eps = blocks.rows(hyper, Hyper.EPS)
    correction1, correction2 = corrections(blocks, hyper, rates, advance=False)
    denominator = root(v.abs() / correction2) + eps
    ratio = torch.where(part, denominator / (root(fresh.abs() / correction2) + eps), zero)
    direction = torch.where(part, (m / correction1) / denominator, zero)
    u = direction + blocks.rows(hyper, Hyper.WEIGHT_DECAY) * p
    sums = torch.stack((ratio.amax(1), (direction * direction).sum(1), (u * u).sum(1)))
    commit(partials, sums, decision)
    commit(v_fresh, fresh, decision)
    if grads is not None:
        commit(m_old, m, decision)


def soft_threshold_rate_reference(
    blocks: BlockMap, partials: Tensor, hyper: Tensor, rates: Tensor, decision: Tensor
) -> None:
    """Twin of `soft_threshold_rate`."""
    factor = blocks.max(partials[0])
    direction_norm, u_norm = blocks.sum(partials[1]).sqrt(), blocks.sum(partials[2]).sqrt()
    one = torch.ones_like(factor)
    share = torch.where(u_norm > 0, (direction_norm / u_norm).minimum(one), one)
    factor = torch.where(hyper[:, Hyper.WEIGHT_DECAY] > 0, factor * share + one - share, factor)
    factor = factor.clamp(hyper[:, Hyper.FACTOR_MIN], hyper[:, Hyper.FACTOR_MAX])
    last = rates[:, Rate.FACTOR]
    factor = factor.clamp(last * hyper[:, Hyper.THRESHOLD_LOW], last * hyper[:, Hyper.THRESHOLD_HIGH])
    factor = torch.where(rates[:, Rate.COUNT] > 0, factor, one)
    coeff = rates[:, Rate.COEFF]
    coeff = torch.where(hyper[:, Hyper.COEFF_BIAS_CORRECTION] != 0, coeff / rates[:, Rate.COEFF_CORRECTION], coeff)
    new = rates.clone()
    new[:, Rate.STEP] += 1
    new[:, Rate.FACTOR] = factor
    new[:, Rate.COEFF_USED] = coeff * factor
    new[:, Rate.RATE] = hyper[:, Hyper.LR] * (coeff * factor)
    commit(rates, new, decision)


def compressed_apply_reference(
    params: TensorTable,
    blocks: BlockMap,
    messages: Tensor,
    exp_avg: Tensor | None,
    exp_avg_sq: Tensor,
    hyper: Tensor,
    rates: Tensor,
    decision: Tensor,
) -> None:
    """Twin of `compressed_apply`."""
    v = exp_avg_sq.view(blocks.blocks, blocks.block_elements)
    p = params.gather(blocks)
    m = momentum_of_messages(blocks, messages, rates) if exp_avg is None else exp_avg.view(v.shape)
    correction1, correction2 = corrections(blocks, hyper, rates, advance=False)
    denominator = root(v.abs() / correction2) + blocks.rows(hyper, Hyper.EPS)
    direction = torch.where(v > 0, (m / correction1) / denominator, torch.zeros_like(v))
    u = direction + blocks.rows(hyper, Hyper.WEIGHT_DECAY) * p
    commit(p, p - blocks.rows(rates, Rate.RATE) * u, decision)
    params.scatter(p, blocks)
