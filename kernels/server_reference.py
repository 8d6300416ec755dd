"""Plain-torch twins of server.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .lamb_reference import commit
from .planes_reference import header, keep_mask, lazy_error, masked_zero, pack_planes, planes, unpack_planes


def reduce_chunk_reference(
    received: Tensor,
    y: Tensor,
    y_scale: Tensor,
    decision: Tensor,
    message: Tensor,
    partials: Tensor,
    block_elements: int,
) -> None:
    """Twin of `reduce_chunk`."""
    ranks = received.shape[0]
    old = y.view(-1, block_elements)
    scale = header(received, 0)
    total = torch.zeros_like(old)
    for rank in range(ranks):
        packed = planes(received)[rank].view(-1, block_elements // 8)
        total += unpack_planes(packed, scale[rank].view(1, 1))
    new = keep_mask(masked_zero(old), old, total / ranks + lazy_error(old, y_scale))
    commit(planes(message.unsqueeze(0)), pack_planes(new).view(1, -1), decision)
    commit(partials, (new * new).sum(1), decision)
    commit(old, new, decision)


def seal_server_reference(
    partials: Tensor, count: Tensor, tag: Tensor, decision: Tensor, message: Tensor, y_scale: Tensor
) -> None:
    """Twin of `seal_server`."""
    commit(y_scale, (partials.sum() / count.clamp(min=1)).sqrt(), decision)
    sealed = message.unsqueeze(0)
    header(sealed, 0).copy_(y_scale)
    header(sealed, 1).zero_()
    header(sealed, 2).zero_()
    header(sealed, 3).copy_(tag)
