"""Plain-torch twins of server.py. As in lamb_reference.py, the maths alone stands in functions of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from .lamb_reference import commit
from .momentum_reference import scale_of, stamp_headers, sum_of_sizes
from .planes_reference import balance, header, keep_mask, lazy_error, masked_zero, pack_planes, planes, unpack_planes
from .tables import SERVER_RANK_SHIFT, Decision, Header


def serve(received: Tensor, scales: Tensor, y: Tensor, y_scale: Tensor, l1: bool) -> tuple[Tensor, Tensor]:
    """New y, and its sum of squares (or absolute values) in every block.

    Args:
        received: planes of every rank, [ranks, blocks, B/8], bytes in any integer dtype.
        scales: fp32 [ranks], their scales; summed in rank order.
        y: fp32 [blocks, B].
        y_scale: fp32 [1].
        l1: as in `compress_momentum`.
    """
    total = torch.zeros_like(y)
    for packed, scale in zip(received.unbind(0), scales.unbind(0), strict=True):
        total = total + unpack_planes(packed, scale)
    ranks = y.new_full((), received.shape[0])  # by a number, CUDA would multiply by the reciprocal
    new = keep_mask(masked_zero(y), y, total / ranks + lazy_error(y, y_scale))
    return new, sum_of_sizes(new, l1)


def reduce_chunk_reference(
    received: Tensor,
    y: Tensor,
    y_scale: Tensor,
    decision: Tensor,
    message: Tensor,
    partials: Tensor,
    block_elements: int,
    l1: bool = False,
) -> None:
    """Twin of `reduce_chunk`."""
    old = y.view(-1, block_elements)
    packed = planes(received).view(received.shape[0], -1, block_elements // 8)
    new, sizes = serve(packed, header(received, 0), old, y_scale, l1)
    commit(planes(message.unsqueeze(0)), pack_planes(new).view(1, -1), decision)
    commit(partials, sizes, decision)
    commit(old, new, decision)


def seal_server_reference(
    partials: Tensor, count: Tensor, tag: Tensor, stamp: Tensor, decision: Tensor, message: Tensor, y_scale: Tensor,
    l1: bool = False,
) -> None:  # fmt: skip
    """Twin of `seal_server`."""
    commit(y_scale, scale_of(partials.sum(), count, l1), decision)
    sealed = message.unsqueeze(0)
    report = decision[Decision.FAULT] | decision[Decision.BAD_RANK] << SERVER_RANK_SHIFT
    header(sealed, Header.SCALE).copy_(y_scale)
    header(sealed, Header.FLAGS).copy_(torch.where(decision[Decision.SKIP] != 0, report, 0))
    header(sealed, Header.SQUARES).zero_()
    stamp_headers(sealed, tag, stamp, decision)
    balance(sealed)
