"""Plain-torch twins of variance.py. As in lamb_reference.py, the maths alone stands in functions of its own.

Its momentum is the direction's numerator: m over its bias correction, if there is one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .gradients_reference import sum_of_squares
from .lamb_reference import block_rows, bounded_trust_ratio, commit, root, round_to
from .momentum_reference import finite_gradient, momentum_of_messages
from .planes_reference import block_planes, plane_bits, planes
from .tables import HEADER_BYTES, BlockMap, Clip, Hyper, Rate, TensorTable


def exchange_rows(
    blocks: BlockMap, old_messages: Tensor, new_messages: Tensor, hyper: Tensor, rates: Tensor, bias_correction: bool
) -> Tensor:
    """What two exchanges say of every block, [blocks, 3]: g~^2 where the sign stayed, where it changed, and |m|."""
    scaling = blocks.rows(rates, Rate.SCALING)
    beta1, one_minus_beta1 = blocks.rows(hyper, Hyper.BETA1, Hyper.ONE_MINUS_BETA1).split(1, 1)
    old, new = (block_planes(m, blocks.block_elements)[1] / scaling for m in (old_messages, new_messages))
    stayed, changed = ((new - beta1 * old) / one_minus_beta1, (new + beta1 * old) / one_minus_beta1)
    m = new / blocks.rows(rates, Rate.CORRECTION1) if bias_correction else new
    return torch.cat((stayed * stayed, changed * changed, m), 1)


def denominator(v: Tensor, row: Tensor, bias_correction: bool) -> Tensor:
    """sqrt(|v|) + eps; v is negative where the user masked it."""
    v = v.abs()
    return root(v / row[:, 7:8] if bias_correction else v) + row[:, 4:5]


def dense_momentum(g: Tensor, m: Tensor, v: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """g^2 and new m of one process."""
    g, _ = finite_gradient(g)
    return g * g, torch.where(v > 0, row[:, 0:1] * m + row[:, 1:2] * g, 0.0)


def fresh(g_squares: Tensor, v: Tensor, v_fresh: Tensor, row: Tensor) -> Tensor:
    """New v'."""
    return torch.where(v > 0, row[:, 2:3] * v_fresh + row[:, 3:4] * g_squares, v_fresh)


def layer_sums(
    p: Tensor, m: Tensor, v: Tensor, v_fresh: Tensor, row: Tensor, bias_correction: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The update u; of every block the largest ratio, and the sums of squares of up, u and p."""
    part = v > 0
    below = denominator(v, row, bias_correction)
    ratio = torch.where(part, below / denominator(v_fresh, row, bias_correction), 0.0)
    up = torch.where(part, m / below, 0.0)
    u = up + row[:, 5:6] * p
    return u, ratio.amax(1), sum_of_squares(up), sum_of_squares(u), sum_of_squares(p)


def move(p: Tensor, m: Tensor, v: Tensor, row: Tensor, rate: Tensor, bias_correction: bool) -> Tensor:
    """New p; elements that take no part move by weight decay alone. rate is [blocks, 1]."""
    up = torch.where(v > 0, m / denominator(v, row, bias_correction), 0.0)
    return p - rate * (up + row[:, 5:6] * p)


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
    bias_correction: bool,
) -> None:
    """Twin of `fresh_variance`."""
    p = params.gather(blocks)
    v, v_fresh = exp_avg_sq.view(p.shape), exp_avg_sq_fresh.view(p.shape)
    rows = block_rows(blocks, hyper, rates)
    if grads is not None:
        assert exp_avg is not None
        m_old, g = exp_avg.view(p.shape), grads.gather(blocks) * clip[Clip.GRAD_SCALE]
        squares, m_new = dense_momentum(g, m_old, v, rows)
        m = m_new / rows[:, 6:7] if bias_correction else m_new
    else:
        row = exchange_rows(blocks, old_messages, new_messages, hyper, rates, bias_correction)
        old, new = (block_planes(messages, blocks.block_elements)[0] for messages in (old_messages, new_messages))
        squares, m = decode(old, new, row)
        if exp_avg is not None:
            m_new = momentum_of_messages(blocks, new_messages, rates)
            squares = ((m_new - rows[:, 0:1] * exp_avg.view(p.shape)) / rows[:, 1:2]).square()
    new = fresh(squares, v, v_fresh, rows)
    _, *sums = layer_sums(p, m, v, new, rows, bias_correction)
    commit(partials, torch.stack(sums), decision)
    commit(v_fresh, new, decision)
    if grads is not None:
        commit(m_old, m_new, decision)
    else:
        commit(planes(old_messages), planes(new_messages), decision)


def decode(old: Tensor, new: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """g~^2 and m of every element from planes, bytes in any integer dtype [blocks, B/8], and `exchange_rows`."""
    stayed, changed, m = row.split(1, 1)
    return torch.where(plane_bits(old ^ new), changed, stayed), torch.where(plane_bits(new), m, -m)


def running_trust_ratio(hyper: Tensor, rates: Tensor) -> Tensor:
    """C of every segment, over its bias correction if that is wanted."""
    coeff = rates[:, Rate.COEFF]
    return torch.where(hyper[:, Hyper.COEFF_BIAS_CORRECTION] != 0, coeff / rates[:, Rate.COEFF_CORRECTION], coeff)


def soft_threshold_rate(
    factor: Tensor, up_squares: Tensor, u_squares: Tensor, p_squares: Tensor, hyper: Tensor, rates: Tensor
) -> Tensor:
    """The layer table after this step, from the largest ratio and sums of squares of every segment."""
    direction_norm, u_norm = up_squares.sqrt(), u_squares.sqrt()
    one = torch.ones_like(factor)
    share = torch.where(u_norm > 0, (direction_norm / u_norm).minimum(one), one)
    factor = torch.where(hyper[:, Hyper.WEIGHT_DECAY] > 0, factor * share + one - share, factor)
    takes_part = rates[:, Rate.COUNT] > 0
    unclipped = torch.where(takes_part, factor, one)
    factor = factor.clamp(hyper[:, Hyper.FACTOR_MIN], hyper[:, Hyper.FACTOR_MAX])
    last = rates[:, Rate.FACTOR]
    factor = factor.clamp(last * hyper[:, Hyper.THRESHOLD_LOW], last * hyper[:, Hyper.THRESHOLD_HIGH])
    factor = torch.where(takes_part, factor, one)
    _, trust = bounded_trust_ratio(p_squares.sqrt(), u_norm, hyper)
    used = (running_trust_ratio(hyper, rates) * factor).minimum(hyper[:, Hyper.MAX_RATE_RATIO] * trust)
    new = rates.clone()
    new[:, Rate.STEP] += 1
    new[:, Rate.FACTOR] = factor
    new[:, Rate.COEFF_USED] = used
    new[:, Rate.RATE] = hyper[:, Hyper.LR] * used
    new[:, Rate.UNCLIPPED] = unclipped
    return new


def soft_threshold_rate_reference(
    blocks: BlockMap, partials: Tensor, hyper: Tensor, rates: Tensor, decision: Tensor
) -> None:
    """Twin of `soft_threshold_rate`."""
    factor, (up, u, p) = blocks.max(partials[0]), (blocks.sum(squares) for squares in partials[1:])
    commit(rates, soft_threshold_rate(factor, up, u, p, hyper, rates), decision)


def compressed_apply_reference(
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
    """Twin of `compressed_apply`."""
    p = params.gather(blocks)
    m = momentum_of_messages(blocks, new_messages, rates) if exp_avg is None else exp_avg.view(p.shape)
    row, rate = block_rows(blocks, hyper, rates), blocks.rows(rates, Rate.RATE)
    if bias_correction:
        m = m / row[:, 6:7]
    commit(p, move(p, m, exp_avg_sq.view(p.shape), row, rate, bias_correction), decision)
    params.scatter(p, blocks)
    round_to(copies, p, blocks, decision)
    if exp_avg is None:
        commit(old_messages[:, :HEADER_BYTES], new_messages[:, :HEADER_BYTES], decision)
