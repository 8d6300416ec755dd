"""Plain-torch twins of lamb.py.

The functions without `_reference` in their name are the maths alone, on dense blocks [blocks, B] and on `block_rows`;
backend "inductor" compiles the same functions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .gradients_reference import sum_of_squares
from .tables import BlockMap, Clip, Decision, Hyper, Rate, TensorTable


def commit(destination: Tensor, new: Tensor, decision: Tensor) -> None:
    """Overwrite destination with new values unless this step is skipped; reads nothing on the host."""
    torch.where(decision[Decision.SKIP] != 0, destination, new, out=destination)


def root(x: Tensor) -> Tensor:
    """Square root of fp32, correctly rounded as in the kernels; eager on a CPU by numpy, as torch's own is not."""
    if torch.compiler.is_compiling() or x.device.type != "cpu":
        return x.sqrt()
    return torch.from_numpy(np.sqrt(x.numpy()))


def round_to(copies: TensorTable | None, p: Tensor, blocks: BlockMap, decision: Tensor) -> None:
    """Overwrite the parameters whose masters p [blocks, B] are, if there are any and the step is not skipped."""
    if copies is not None:
        rounded = copies.gather(blocks)
        commit(rounded, p, decision)
        copies.scatter(rounded, blocks)


def block_rows(blocks: BlockMap, hyper: Tensor, rates: Tensor, advance: bool = False) -> Tensor:
    """Scalars of every block, [blocks, 8]: beta1, 1-beta1, beta2, 1-beta2, eps, weight decay, both bias corrections.

    Args:
        blocks: the block map.
        hyper: fp32 [segments, len(Hyper)].
        rates: fp32 [segments, len(Rate)].
        advance: count the step that is being taken in the corrections.
    """
    scalars = hyper[:, Hyper.BETA1 : Hyper.WEIGHT_DECAY + 1]
    corrections = rates[:, Rate.CORRECTION1 : Rate.CORRECTION2 + 1]
    if advance:
        corrections = scalars[:, 0:4:2] * corrections + scalars[:, 1:4:2]
    return torch.cat((scalars, corrections), 1).index_select(0, blocks.segment)


def moments(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, row: Tensor, bias_correction: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """New m and v, and the update u."""
    beta1, one_minus_beta1, beta2, one_minus_beta2, _, weight_decay, _, _ = row.split(1, 1)
    m = beta1 * m + one_minus_beta1 * g
    v = beta2 * v + one_minus_beta2 * (g * g)
    return m, v, direction(m, v, row, bias_correction) + weight_decay * p


def direction(m: Tensor, v: Tensor, row: Tensor, bias_correction: bool) -> Tensor:
    """m / (sqrt(v) + eps), m and v over their bias corrections first if there are any."""
    _, _, _, _, eps, _, correction1, correction2 = row.split(1, 1)
    if bias_correction:
        m, v = m / correction1, v / correction2
    return m / (root(v) + eps)


def lamb_moments_reference(
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
    """Twin of `lamb_moments`."""
    p = params.gather(blocks)
    m, v = exp_avg.view(p.shape), exp_avg_sq.view(p.shape)
    g = grads.gather(blocks) * clip[Clip.GRAD_SCALE]
    row = block_rows(blocks, hyper, rates, advance=True)
    m_new, v_new, u = moments(p, g, m, v, row, bias_correction)
    commit(partials, torch.stack((sum_of_squares(p), sum_of_squares(u))), decision)
    commit(m, m_new, decision)
    commit(v, v_new, decision)


def bounded_trust_ratio(p_norm: Tensor, u_norm: Tensor, hyper: Tensor) -> tuple[Tensor, Tensor]:
    """|p| / |u| of every segment before and within its bounds; 1 where either norm is 0."""
    one = torch.ones_like(p_norm)
    still = (p_norm == 0) | (u_norm == 0)
    unclipped = torch.where(still, one, p_norm / u_norm)
    c = unclipped.clamp(hyper[:, Hyper.MIN_COEFF], hyper[:, Hyper.MAX_COEFF])
    return unclipped, torch.where(still, one, c)


def trust_ratio(p_squares: Tensor, u_squares: Tensor, hyper: Tensor, rates: Tensor) -> Tensor:
    """The layer table after this step, from sums of squares per segment."""
    unclipped, c = bounded_trust_ratio(p_squares.sqrt(), u_squares.sqrt(), hyper)
    one = torch.ones_like(c)
    new = rates.clone()
    new[:, Rate.STEP] += 1
    for column, decay, one_minus_decay, value in (
        (Rate.COEFF, Hyper.COEFF_BETA, Hyper.ONE_MINUS_COEFF_BETA, c),
        (Rate.COEFF_CORRECTION, Hyper.COEFF_BETA, Hyper.ONE_MINUS_COEFF_BETA, one),
        (Rate.CORRECTION1, Hyper.BETA1, Hyper.ONE_MINUS_BETA1, one),
        (Rate.CORRECTION2, Hyper.BETA2, Hyper.ONE_MINUS_BETA2, one),
    ):
        new[:, column] = hyper[:, decay] * rates[:, column] + hyper[:, one_minus_decay] * value
    new[:, Rate.COEFF_USED] = c
    new[:, Rate.RATE] = hyper[:, Hyper.LR] * c
    new[:, Rate.UNCLIPPED] = unclipped
    return new


def trust_ratio_reference(blocks: BlockMap, partials: Tensor, hyper: Tensor, rates: Tensor, decision: Tensor) -> None:
    """Twin of `trust_ratio`."""
    commit(rates, trust_ratio(blocks.sum(partials[0]), blocks.sum(partials[1]), hyper, rates), decision)


def apply(p: Tensor, m: Tensor, v: Tensor, row: Tensor, rate: Tensor, bias_correction: bool) -> Tensor:
    """New p; rate is [blocks, 1]."""
    return p - rate * (direction(m, v, row, bias_correction) + row[:, 5:6] * p)


def lamb_apply_reference(
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
    """Twin of `lamb_apply`."""
    p = params.gather(blocks)
    m, v = exp_avg.view(p.shape), exp_avg_sq.view(p.shape)
    rate = blocks.rows(rates, Rate.RATE)
    commit(p, apply(p, m, v, block_rows(blocks, hyper, rates), rate, bias_correction), decision)
    params.scatter(p, blocks)
    round_to(copies, p, blocks, decision)
