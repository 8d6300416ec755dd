"""Plain-torch twins of decision.py."""

from __future__ import annotations

import torch
from torch import Tensor

from .planes_reference import check_sum, checked_words, header
from .tables import NORM_RTOL, RHO_DECAY, SERVER_RANK_SHIFT, Clip, Decision, Fault, Header, Roll

FATAL = ~int(Fault.NONFINITE)


def record_decision(decision: Tensor, bad: Tensor, rank: Tensor) -> None:
    """Write whether this step is skipped (bad, bool []) and move the counters."""
    skip = bad.to(torch.int32)
    decision[Decision.SKIP] = skip
    decision[Decision.COUNTED] += 1 - skip
    decision[Decision.SKIPPED] += skip
    decision[Decision.STREAK] = (decision[Decision.STREAK] + 1) * skip
    decision[Decision.BAD_RANK] = torch.where(bad, rank, decision[Decision.BAD_RANK])


def first_of(condition: Tensor) -> Tensor:
    """Index of the first True of a vector, int32 []; 0 if there is none."""
    return condition.to(torch.int32).argmax().to(torch.int32)


def worst_of(faults: Tensor) -> tuple[Tensor, Tensor]:
    """What is wrong altogether, int32 [], and the first rank with an error, or else the first that is flagged."""
    fatal = faults & FATAL != 0
    together = torch.zeros_like(faults[0])
    for kind in Fault:
        together = together | ((faults & kind) != 0).any().to(torch.int32) * int(kind)
    return together, torch.where(fatal.any(), first_of(fatal), first_of(faults != 0))


def decide_averaged_reference(
    partials: Tensor, local_squares: Tensor, roll: Tensor, decision: Tensor, clip: Tensor, track_rho: bool
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
    failed, unlike = roll[:, Roll.FAILED] != 0, (roll != roll[0])[:, : Roll.FAILED].any(1)
    fault, rank = worst_of(failed.to(torch.int32) * Fault.FAILED + unlike.to(torch.int32) * Fault.SETTINGS)
    rank = torch.where(fault != 0, rank, -1)
    fault = fault | (~finite).to(torch.int32) * Fault.NONFINITE
    decision[Decision.FAULT] = fault
    record_decision(decision, fault != 0, rank)


def clip_local_reference(local_squares: Tensor, clip: Tensor) -> None:
    """Twin of `clip_local`."""
    norm = (local_squares.sum() / local_squares.numel()).sqrt()
    rho = torch.where(clip[Clip.RHO_WEIGHT] > 0, clip[Clip.RHO] / clip[Clip.RHO_WEIGHT], torch.ones_like(norm))
    scale = clip[Clip.MAX_NORM] * rho / norm
    usable = (scale > 0) & (scale < 1)  # 0 where the norm is inf: it would hide what made it so
    clip[Clip.GRAD_SCALE] = torch.where(usable, scale, torch.ones_like(scale)) * clip[Clip.UNSCALE]


def decide_exchanged_reference(received: Tensor, headers: Tensor, message_words: Tensor, decision: Tensor) -> None:
    """Twin of `decide_exchanged`."""
    words = received.view(torch.int32)
    at = headers // 4
    ranks = torch.arange(headers.shape[1], dtype=torch.int32, device=received.device)

    def unlike(field: Header) -> Tensor:
        return words[at + field] != words[at[:, :1] + field]

    faults = words[at + Header.FLAGS]
    for kind, found in (
        (Fault.LAYOUT, unlike(Header.TAG)),
        (Fault.STEP, unlike(Header.STEP)),
        (Fault.SETTINGS, unlike(Header.SETTINGS)),
    ):
        faults = faults | found.to(torch.int32) * int(kind)
    checked = words[at.unsqueeze(2) + checked_words(message_words).unsqueeze(1)]
    corrupt = (checked.sum(2, dtype=torch.int32) != 0) | (words[at + Header.SENDER] != ranks)
    faults = torch.where(corrupt, int(Fault.CORRUPT), faults)
    of_rank = torch.zeros_like(ranks)
    for bucket in faults.unbind(0):
        of_rank = of_rank | bucket
    fault, rank = worst_of(of_rank)
    decision[Decision.SKIP] = (fault != 0).to(torch.int32)
    decision[Decision.FAULT] = fault
    decision[Decision.BAD_RANK] = torch.where(fault != 0, rank, decision[Decision.BAD_RANK])
    squares = words[at + Header.SQUARES].view(torch.float32)
    equal = ((squares == squares[:, :1]) & (squares > 0)).all()
    decision[Decision.EQUAL] = (decision[Decision.EQUAL] + 1) * equal.to(torch.int32)
    total = squares.sum(0)
    one_norm = ((total - total[0]).abs() <= total[0] * NORM_RTOL).all() & (total[0] > 0)
    decision[Decision.ONE_NORM] = (decision[Decision.ONE_NORM] + 1) * one_norm.to(torch.int32)


def accept_returned_reference(messages: Tensor, tag: Tensor, decision: Tensor, first: bool) -> None:
    """Twin of `accept_returned`."""
    ranks = torch.arange(messages.shape[0], dtype=torch.int32, device=messages.device)
    intact = (
        (check_sum(messages) == 0)
        & (header(messages, Header.TAG) == tag)
        & (header(messages, Header.SENDER) == ranks)
        & (header(messages, Header.STEP) == decision[Decision.COUNTED] + decision[Decision.SKIPPED] - int(not first))
    )  # fmt: skip
    damaged = ~intact.all()
    decision[Decision.DAMAGED] = torch.where(damaged, int(Fault.DAMAGED), decision[Decision.DAMAGED])
    if not first:
        decision[Decision.SKIP] = decision[Decision.SKIP] | damaged.to(torch.int32)
        return
    reports = torch.where(intact, header(messages, Header.FLAGS), 0)
    _, server = worst_of(reports & ((1 << SERVER_RANK_SHIFT) - 1))
    report = reports.index_select(0, server.view(1))[0]  # indexing by a tensor would read it on the host
    decision[Decision.FAULT] = report & ((1 << SERVER_RANK_SHIFT) - 1)
    record_decision(decision, (report != 0) | damaged, report >> SERVER_RANK_SHIFT)
