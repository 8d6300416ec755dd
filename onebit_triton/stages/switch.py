"""From warmup to compression and back. Rare, so plain torch, and allowed to synchronise."""

from __future__ import annotations

import torch
from torch import Tensor

from ..buckets import Bucket
from ..kernels.momentum_reference import momentum_of_messages
from ..kernels.planes_reference import lazy_error, masked_zero
from ..kernels.tables import Hyper, Rate
from .compression import Compression
from .replica import Replica
from .uncompressed import Uncompressed
from .warmup import Warmup


def freeze(replica: Replica, masks: dict[Tensor, Tensor]) -> Compression | Uncompressed:
    """End the warmup: freeze v and C, give every tensor its s_j, mask what never saw a gradient, allocate the errors.

    Args:
        replica: state of a finished warmup; changed in place.
        masks: parameter -> mask (broadcastable, nonzero where the element takes part) given by the user.

    Returns:
        The stage that follows.
    """
    mask_variance(replica, masks)
    for bucket in replica.buckets:
        bucket.averaged = None
        assert bucket.exp_avg is not None
        bucket.exp_avg.copy_(torch.where(bucket.exp_avg_sq > 0, bucket.exp_avg, torch.zeros_like(bucket.exp_avg)))
        bucket.exp_avg_sq_fresh = bucket.exp_avg_sq.abs()
    _count_elements(replica)
    _scale_momenta(replica)
    return stage_two(replica)


def mask_variance(replica: Replica, masks: dict[Tensor, Tensor]) -> None:
    """Negate v where the user's mask is zero: such elements take no part, and their v is not lost."""
    for bucket in replica.buckets:
        for view, parameter in zip(bucket.views(bucket.exp_avg_sq), bucket.parameters, strict=True):
            if parameter in masks:
                view.copy_(torch.where(masks[parameter] != 0, view, -view))


def stage_two(replica: Replica) -> Compression | Uncompressed:
    """The second stage over buckets whose dense state is in place; allocates what only it needs."""
    _count_elements(replica)
    ranks, rank = replica.communicator.ranks, replica.communicator.rank
    if ranks == 1:
        return Uncompressed(replica)
    for bucket in replica.buckets:
        zero = torch.zeros_like(bucket.exp_avg_sq)
        bucket.x = torch.where(bucket.exp_avg_sq > 0, zero, -zero)
        bucket.y = bucket.x.view(ranks, -1)[rank].clone()
        bucket.x_scale.zero_()
        bucket.y_scale.zero_()
    return Compression(replica)


def _count_elements(replica: Replica) -> None:
    """Count the elements that take part: per tensor, per bucket, and in this rank's chunk."""
    for bucket in replica.buckets:
        part = bucket.exp_avg_sq > 0
        per_block = part.view(bucket.map.blocks, -1).sum(1).double()
        bucket.columns(Rate.COUNT).copy_(bucket.map.sum(per_block))
        bucket.count.fill_(per_block.sum())
        chunks = per_block.view(replica.communicator.ranks, -1)
        bucket.chunk_count.fill_(chunks[replica.communicator.rank].sum())


def _scale_momenta(replica: Replica) -> None:
    """s_j = mean_j(rms) / rms_j; 1 for tensors without momentum, which stay out of the mean."""
    if not replica.buckets:
        return
    squares = [bucket.layer_sums(bucket.exp_avg.double().square()) for bucket in replica.buckets]  # type: ignore[union-attr]
    rms = (torch.cat(squares) / replica.rates[:, Rate.COUNT].double().clamp(min=1)).sqrt()
    moving = rms > 0
    scaling = torch.where(moving, (rms.sum() / moving.sum()) / rms, torch.ones_like(rms)).float()
    # A tensor that hardly moved must not overflow the buffer's norm when it moves again.
    scaling = scaling.clamp(max=1e12)
    # The ranks computed the same from the same state; on unlike machines the last bit may differ, and must not.
    replica.communicator.broadcast(scaling)
    replica.rates[:, Rate.SCALING] = scaling
    replica.rates[:, Rate.FACTOR] = 1.0


NOT_CONTRACTING = 1.2
"""Ratio of an error to what was sent from which on a momentum counts as too unequal for one scale; at most sqrt(2)."""


def expected_error_ratio(replica: Replica) -> float:
    """What compressing the dense momentum by "rms" scales leaves behind, over its norm.

    It is sqrt(2 (1 - |x|_1 / sqrt(N) |x|)) for every bucket x of N elements; 0 without momentum, or if it is not dense.
    """
    left, whole = 0.0, 0.0
    for bucket in replica.buckets:
        if bucket.exp_avg is None:
            continue
        x = bucket.exp_avg.view(bucket.map.blocks, -1).double() * bucket.map.rows(bucket.rates, Rate.SCALING)
        size, norm, count = float(x.abs().sum()), float(x.norm()), float(bucket.count)
        if norm > 0:
            left += 2 * norm * max(0.0, norm - size / count**0.5)
            whole += norm * norm
    return (left / whole) ** 0.5 if whole > 0 else 0.0


def dense_momentum(bucket: Bucket, stage: Compression | Uncompressed | Warmup, number: int) -> Tensor:
    """Momentum of a bucket, fp32 [elements]: the dense tensor, or decoded from the last exchange (a new tensor)."""
    if bucket.exp_avg is not None:
        return bucket.exp_avg
    assert isinstance(stage, Compression)
    momentum = momentum_of_messages(bucket.map, stage.exchange.momentum[number], bucket.rates).view(-1)
    return torch.where(bucket.exp_avg_sq > 0, momentum, torch.zeros_like(momentum))


def pending_error(state: Tensor, scale: Tensor) -> Tensor:
    """Error that x (or y) carries, zero where masked; a new tensor of the same shape."""
    return torch.where(masked_zero(state), torch.zeros_like(state), lazy_error(state, scale))


def thaw(replica: Replica, stage: Compression | Uncompressed) -> Warmup:
    """Return to warmup. The momentum becomes dense; the pending errors of all ranks are folded into it."""
    for number, bucket in enumerate(replica.buckets):
        bucket.exp_avg = dense_momentum(bucket, stage, number)
        if bucket.x is not None:
            fold_error(bucket, _mean_error(replica, bucket))
        bucket.exp_avg_sq.abs_()
        bucket.exp_avg_sq_fresh = bucket.x = bucket.y = None
    replica.rates[:, Rate.SCALING] = 1.0
    return Warmup(replica)


def consolidate(replica: Replica) -> None:
    """Give every worker the mean error that is pending, and servers none: the mean is all that the iterate sees."""
    for bucket in replica.buckets:
        if bucket.x is not None and bucket.y is not None:
            set_error(bucket.x, _mean_error(replica, bucket))
            set_error(bucket.y, torch.zeros_like(bucket.y))
            bucket.x_scale.zero_()
            bucket.y_scale.zero_()


def _mean_error(replica: Replica, bucket: Bucket) -> Tensor:
    """Mean error that is pending in a bucket, of workers and servers together, fp32 [elements] (collective)."""
    assert bucket.x is not None
    assert bucket.y is not None
    ranks, rank = replica.communicator.ranks, replica.communicator.rank
    error = pending_error(bucket.x, bucket.x_scale) / ranks
    error.view(ranks, -1)[rank] += pending_error(bucket.y, bucket.y_scale)
    replica.communicator.all_reduce(error).wait()
    return error


def set_error(state: Tensor, error: Tensor) -> None:
    """Make an error what x (or y) of scale 0 carries, leaving the negative zeros that mark masked elements."""
    state.copy_(torch.where(masked_zero(state), state, error.to(state) + 0.0))  # -0.0 + 0.0 is 0.0


def fold_error(bucket: Bucket, error: Tensor) -> None:
    """Put a pending error, fp32 [elements], into the dense momentum, to be applied where nothing is compressed.

    An error e would be added to s_j b1 m in the next compressed step, so m moves by e / (s_j b1).
    """
    assert bucket.exp_avg is not None
    scale = bucket.map.rows(bucket.rates, Rate.SCALING) * bucket.map.rows(bucket.hyper, Hyper.BETA1)
    bucket.exp_avg += torch.where(scale > 0, error.view(bucket.map.blocks, -1) / scale, 0.0).view(-1)
