"""Plain-torch twins of decision.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .tables import NORM_RTOL, RHO_DECAY, Clip, Decision


def record_decision(decision: Tensor, bad: Tensor, rank: Tensor | None = None) -> None:
    """Write whether this step is skipped (bad, bool []) and move the counters."""
    skip = bad.to(torch.int32)
    decision[Decision.SKIP] = skip
    decision[Decision.COUNTED] += 1 - skip
    decision[Decision.SKIPPED] += skip
    decision[Decision.STREAK] = (decision[Decision.STREAK] + 1) * skip
    unknown = torch.full_like(skip, -1) if rank is None else rank
    decision[Decision.BAD_RANK] = torch.where(bad, unknown, decision[Decision.BAD_RANK])


def decide_averaged_reference(
    partials: Tensor, local_squares: Tensor, decision: Tensor, clip: Tensor, track_rho: bool
) -> None:
    """Twin of `decide_averaged`."""
    squares = partials.sum()
    finite = squares < float("inf")
    unscale = clip[Clip.UNSCALE]
    norm = squares.sqrt() * unscale.abs()
    one = torch.ones_like(norm)
    factor = torch.where(finite & (norm > 0), (clip[Clip.MAX_NORM] / norm).minimum(one), one)
    clip[Clip.GRAD_SCALE] = factor * unscale
    if track_rho:
        rho = (local_squares.sum() / local_squares.numel()).sqrt() / norm
        usable = finite & (rho < float("inf"))
        for entry, value in ((Clip.RHO, rho), (Clip.RHO_WEIGHT, one)):
            clip[entry] = torch.where(usable, RHO_DECAY * clip[entry] + (1 - RHO_DECAY) * value, clip[entry])
    record_decision(decision, ~finite)


def clip_local_reference(local_squares: Tensor, clip: Tensor) -> None:
    """Twin of `clip_local`."""
    norm = (local_squares.sum() / local_squares.numel()).sqrt()
    rho = torch.where(clip[Clip.RHO_WEIGHT] > 0, clip[Clip.RHO] / clip[Clip.RHO_WEIGHT], torch.ones_like(norm))
    scale = clip[Clip.MAX_NORM] * rho / norm
    usable = (scale > 0) & (scale < 1)  # 0 where the norm is inf: it would hide what made it so
    clip[Clip.GRAD_SCALE] = torch.where(usable, scale, torch.ones_like(scale)) * clip[Clip.UNSCALE]


def decide_exchanged_reference(received: Tensor, headers: Tensor, tags: Tensor, decision: Tensor) -> None:
    """Twin of `decide_exchanged`."""
    words = received.view(torch.int32)
    at = headers // 4
    flagged = words[at + 1] != 0
    alien = words[at + 3] != tags.unsqueeze(1)
    squares = words[at + 2].view(torch.float32)
    bad_of_rank = (flagged | alien).any(0)
    equal = ((squares == squares[:, :1]) & (squares > 0)).all()
    decision[Decision.EQUAL] = (decision[Decision.EQUAL] + 1) * equal.to(torch.int32)
    total = squares.sum(0)
    one_norm = ((total - total[0]).abs() <= total[0] * NORM_RTOL).all() & (total[0] > 0)
    decision[Decision.ONE_NORM] = (decision[Decision.ONE_NORM] + 1) * one_norm.to(torch.int32)
    decision[Decision.BAD_TAG] = torch.maximum(decision[Decision.BAD_TAG], alien.any().to(torch.int32))
    record_decision(decision, bad_of_rank.any(), bad_of_rank.to(torch.int32).argmax().to(torch.int32))
