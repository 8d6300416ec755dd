"""Plain-torch twins of lamb.py, and the update direction that both stages share."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .tables import BlockMap, Clip, Decision, Hyper, Rate, TensorTable


def commit(destination: Tensor, new: Tensor, decision: Tensor) -> None:
    """Overwrite destination with new values unless this step is skipped; reads nothing on the host."""
    torch.where(decision[Decision.SKIP] != 0, destination, new, out=destination)


def root(x: Tensor) -> Tensor:
    """Square root of fp32, correctly rounded as in the kernels; by numpy on a CPU, where torch's own is not."""
    return torch.from_numpy(np.sqrt(x.numpy())) if x.device.type == "cpu" else x.sqrt()


def corrections(blocks: BlockMap, hyper: Tensor, rates: Tensor, advance: bool) -> tuple[Tensor, Tensor]:
    """Bias corrections of m and v per block, [blocks, 1]; `advance` counts the step that is being taken."""
    found = []
    for column, beta, one_minus_beta in (
        (Rate.CORRECTION1, Hyper.BETA1, Hyper.ONE_MINUS_BETA1),
        (Rate.CORRECTION2, Hyper.BETA2, Hyper.ONE_MINUS_BETA2),
    ):
        value = rates[:, column]
        if advance:
            value = hyper[:, beta] * value + hyper[:, one_minus_beta]
        value = torch.where(hyper[:, Hyper.BIAS_CORRECTION] != 0, value, torch.ones_like(value))
        found.append(value.index_select(0, blocks.segment).unsqueeze(1))
    return found[0], found[1]


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
) -> None:
    """Twin of `lamb_moments`."""
    shape = (blocks.blocks, blocks.block_elements)
    p = params.gather(blocks)
    g = grads.gather(blocks) * clip[Clip.GRAD_SCALE]
    m, v = exp_avg.view(shape), exp_avg_sq.view(shape)
    m_new = blocks.rows(hyper, Hyper.BETA1) * m + blocks.rows(hyper, Hyper.ONE_MINUS_BETA1) * g
    v_new = blocks.rows(hyper, Hyper.BETA2) * v + blocks.rows(hyper, Hyper.ONE_MINUS_BETA2) * (g * g)
    correction1, correction2 = corrections(blocks, hyper, rates, advance=True)
    denominator = root(v_new / correction2) + blocks.rows(hyper, Hyper.EPS)
    u = (m_new / correction1) / denominator + blocks.rows(hyper, Hyper.WEIGHT_DECAY) * p
    commit(partials, torch.stack(((p * p).sum(1), (u * u).sum(1))), decision)
    commit(m, m_new, decision)
    commit(v, v_new, decision)


def trust_ratio_reference(blocks: BlockMap, partials: Tensor, hyper: Tensor, rates: Tensor, decision: Tensor) -> None:
    """Twin of `trust_ratio`."""
    p_norm, u_norm = blocks.sum(partials[0]).sqrt(), blocks.sum(partials[1]).sqrt()
    c = (p_norm / u_norm).clamp(hyper[:, Hyper.MIN_COEFF], hyper[:, Hyper.MAX_COEFF])
    one = torch.ones_like(c)
    c = torch.where((p_norm == 0) | (u_norm == 0), one, c)
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
    commit(rates, new, decision)


def lamb_apply_reference(
    params: TensorTable,
    blocks: BlockMap,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    hyper: Tensor,
    rates: Tensor,
    decision: Tensor,
) -> None:
    """Twin of `lamb_apply`."""
    shape = (blocks.blocks, blocks.block_elements)
    p = params.gather(blocks)
    correction1, correction2 = corrections(blocks, hyper, rates, advance=False)
    denominator = root(exp_avg_sq.view(shape) / correction2) + blocks.rows(hyper, Hyper.EPS)
    u = (exp_avg.view(shape) / correction1) / denominator + blocks.rows(hyper, Hyper.WEIGHT_DECAY) * p
    commit(p, p - blocks.rows(rates, Rate.RATE) * u, decision)
    params.scatter(p, blocks)
