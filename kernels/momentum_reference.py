"""Plain-torch twins of momentum.py. As in lamb_reference.py, the maths alone stands in functions of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from .planes_reference import (
    balance,
    block_planes,
    header,
    keep_mask,
    lazy_error,
    masked_zero,
    pack_planes,
    planes,
    unpack_planes,
)
from .tables import BlockMap, Clip, Decision, Fault, Header, Hyper, Rate, Stamp, TensorTable


def momentum_of_messages(blocks: BlockMap, messages: Tensor, rates: Tensor) -> Tensor:
    """Momentum [blocks, B] that an exchange left behind: plus or minus T_chunk / s_j."""
    packed, scale = block_planes(messages, blocks.block_elements)
    return unpack_planes(packed, scale / blocks.rows(rates, Rate.SCALING))


def momentum_rows(blocks: BlockMap, messages: Tensor, hyper: Tensor, rates: Tensor) -> Tensor:
    """What `compensate` needs of every block, [blocks, 4]: beta1, its complement, s_j, and |m| in the messages."""
    _, scale = block_planes(messages, blocks.block_elements)
    scaling = blocks.rows(rates, Rate.SCALING)
    return torch.cat((blocks.rows(hyper, Hyper.BETA1, Hyper.ONE_MINUS_BETA1), scaling, scale / scaling), 1)


def finite_gradient(g: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient with elements whose square is not finite replaced by zero, and all squares."""
    squares = g * g
    return torch.where(squares < float("inf"), g, 0.0), squares


def scaled_momentum(g: Tensor, m: Tensor, row: Tensor) -> Tensor:
    """(b1 m + (1-b1) g) s_j."""
    beta1, one_minus_beta1, scaling, _ = row.split(1, 1)
    return (beta1 * m + one_minus_beta1 * g) * scaling


def sum_of_sizes(x: Tensor, l1: bool) -> Tensor:
    """Sum of squares (or of absolute values) of every block, [blocks], of x [blocks, B]."""
    return (x.abs() if l1 else x * x).sum(1)


def scale_of(sizes: Tensor, count: Tensor, l1: bool) -> Tensor:
    """The scale of so many elements whose squares (or absolute values) add up to `sizes`."""
    mean = sizes / count.clamp(min=1)
    return mean if l1 else mean.sqrt()


def compensate(
    g: Tensor, m: Tensor, x: Tensor, x_scale: Tensor, row: Tensor, l1: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """New x, and sums of squares of x (or absolute values) and g in every block."""
    finite, squares = finite_gradient(g)
    new = keep_mask(masked_zero(x), x, scaled_momentum(finite, m, row) + lazy_error(x, x_scale))
    return new, sum_of_sizes(new, l1), squares.sum(1)


def take_back(g: Tensor, m: Tensor, x: Tensor, row: Tensor) -> Tensor:
    """x before this step's momentum came in: the pending error."""
    finite, _ = finite_gradient(g)
    return keep_mask(masked_zero(x), x, x - scaled_momentum(finite, m, row))


def compress_momentum_reference(
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
    """Twin of `compress_momentum`."""
    g = grads.gather(blocks) * clip[Clip.GRAD_SCALE]
    m = momentum_of_messages(blocks, old_messages, rates) if exp_avg is None else exp_avg.view(g.shape)
    row = momentum_rows(blocks, old_messages, hyper, rates)
    new, x_sizes, g_squares = compensate(g, m, x.view(g.shape), x_scale, row, l1)
    planes(new_messages).copy_(pack_planes(new).view(new_messages.shape[0], -1))
    partials[0] = x_sizes
    partials[1] = g_squares
    x.copy_(new.view(-1))


def stamp_headers(messages: Tensor, tag: Tensor, stamp: Tensor, decision: Tensor) -> None:
    """Write who sends which step of which layout with which hyperparameters."""
    header(messages, Header.TAG).copy_(tag)
    header(messages, Header.STEP).copy_(decision[Decision.COUNTED] + decision[Decision.SKIPPED])
    header(messages, Header.SETTINGS).copy_(stamp[Stamp.SETTINGS])
    header(messages, Header.SENDER).copy_(stamp[Stamp.SENDER])


def seal_worker_reference(
    partials: Tensor, count: Tensor, tag: Tensor, stamp: Tensor, decision: Tensor, messages: Tensor, x_scale: Tensor,
    l1: bool = False,
) -> None:  # fmt: skip
    """Twin of `seal_worker`."""
    x_sizes, g_squares = partials[0].sum(), partials[1].sum()
    finite = (x_sizes < float("inf")) & (g_squares < float("inf"))
    x_scale.copy_(scale_of(x_sizes, count, l1))
    header(messages, Header.SCALE).copy_(x_scale)
    header(messages, Header.FLAGS).copy_(torch.where(finite, 0, int(Fault.NONFINITE)) | decision[Decision.DAMAGED])
    header(messages, Header.SQUARES).copy_(g_squares)
    stamp_headers(messages, tag, stamp, decision)
    balance(messages)


def undo_momentum_reference(
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
    """Twin of `undo_momentum`."""
    skip = decision[Decision.SKIP] != 0
    g = grads.gather(blocks) * clip[Clip.GRAD_SCALE]
    m = momentum_of_messages(blocks, old_messages, rates) if exp_avg is None else exp_avg.view(g.shape)
    now = x.view(g.shape)
    now.copy_(torch.where(skip, take_back(g, m, now, momentum_rows(blocks, old_messages, hyper, rates)), now))
    x_scale.copy_(torch.where(skip, 0.0, x_scale))
