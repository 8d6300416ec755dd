"""Plain-torch twins of momentum.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .planes_reference import (
    block_planes,
    header,
    keep_mask,
    lazy_error,
    masked_zero,
    pack_planes,
    planes,
    unpack_planes,
)
from .tables import FLAG_NONFINITE, BlockMap, Clip, Decision, Hyper, Rate, TensorTable


def momentum_of_messages(blocks: BlockMap, messages: Tensor, rates: Tensor) -> Tensor:
    """Momentum [blocks, B] that an exchange left behind: plus or minus T_chunk / s_j."""
    packed, scale = block_planes(messages, blocks.block_elements)
    return unpack_planes(packed, scale / blocks.rows(rates, Rate.SCALING))


def finite_gradient(grads: TensorTable, blocks: BlockMap, clip: Tensor) -> tuple[Tensor, Tensor]:
    """Clipped gradient with elements whose square is not finite replaced by zero, and all squares; [blocks, B]."""
    g = grads.gather(blocks) * clip[Clip.GRAD_SCALE]
    squares = g * g
    return torch.where(squares < float("inf"), g, torch.zeros_like(g)), squares


def scaled_momentum(
    g: Tensor, blocks: BlockMap, messages: Tensor, exp_avg: Tensor | None, hyper: Tensor, rates: Tensor
) -> Tensor:
    """(b1 m + (1-b1) g) s_j, [blocks, B], the momentum read from messages or, if given, from exp_avg."""
    m = momentum_of_messages(blocks, messages, rates) if exp_avg is None else exp_avg.view(g.shape)
    update = blocks.rows(hyper, Hyper.BETA1) * m + blocks.rows(hyper, Hyper.ONE_MINUS_BETA1) * g
    return update * blocks.rows(rates, Rate.SCALING)


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
) -> None:
    """Twin of `compress_momentum`."""
    g, squares = finite_gradient(grads, blocks, clip)
    old = x.view(g.shape)
    new = scaled_momentum(g, blocks, old_messages, exp_avg, hyper, rates) + lazy_error(old, x_scale)
    new = keep_mask(masked_zero(old), old, new)
    planes(new_messages).copy_(pack_planes(new).view(new_messages.shape[0], -1))
    partials[0] = (new * new).sum(1)
    partials[1] = squares.sum(1)
    old.copy_(new)


def seal_worker_reference(partials: Tensor, count: Tensor, tag: Tensor, messages: Tensor, x_scale: Tensor) -> None:
    """Twin of `seal_worker`."""
    x_squares, g_squares = partials[0].sum(), partials[1].sum()
    finite = (x_squares < float("inf")) & (g_squares < float("inf"))
    x_scale.copy_((x_squares / count.clamp(min=1)).sqrt())
    header(messages, 0).copy_(x_scale)
    header(messages, 1).copy_(torch.where(finite, 0, FLAG_NONFINITE))
    header(messages, 2).copy_(g_squares)
    header(messages, 3).copy_(tag)


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
    new_messages: Tensor,
    decision: Tensor,
) -> None:
    """Twin of `undo_momentum`."""
    skip = decision[Decision.SKIP] != 0
    g, _ = finite_gradient(grads, blocks, clip)
    now = x.view(g.shape)
    undone = now - scaled_momentum(g, blocks, old_messages, exp_avg, hyper, rates)
    now.copy_(torch.where(skip, keep_mask(masked_zero(now), now, undone), now))
    x_scale.copy_(torch.where(skip, torch.zeros_like(x_scale), x_scale))
    if exp_avg is None:
        new_messages.copy_(torch.where(skip, old_messages, new_messages))
