"""What a step decides before it changes anything that ranks share: skip or not, and the clipping factor.

All of it stays on the device: the passes that follow read the decision there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import (
    BAD_RANK,
    COUNTED,
    DAMAGED,
    FAULT,
    FLAGS_WORD,
    GRAD_SCALE,
    REDUCE_TILE,
    SENDER_WORD,
    SETTINGS_WORD,
    SKIP,
    SKIPPED,
    SQUARES_WORD,
    STEP_WORD,
    TAG_WORD,
    checked_words,
    kernel,
    require,
    sum_range,
)
from .tables import NORM_RTOL, RHO_DECAY, SERVER_RANK_SHIFT, Clip, Decision, Fault, Roll

_STREAK = tl.constexpr(int(Decision.STREAK))
_EQUAL = tl.constexpr(int(Decision.EQUAL))
_ONE_NORM = tl.constexpr(int(Decision.ONE_NORM))
_NONFINITE = tl.constexpr(int(Fault.NONFINITE))
_FAILED = tl.constexpr(int(Fault.FAILED))
_DAMAGED = tl.constexpr(int(Fault.DAMAGED))
_LAYOUT = tl.constexpr(int(Fault.LAYOUT))
_STEP = tl.constexpr(int(Fault.STEP))
_SETTINGS = tl.constexpr(int(Fault.SETTINGS))
_CORRUPT = tl.constexpr(int(Fault.CORRUPT))
_SHIFT = tl.constexpr(SERVER_RANK_SHIFT)
_REPORT = tl.constexpr((1 << SERVER_RANK_SHIFT) - 1)
_ROLLS = tl.constexpr(len(Roll))
_ROLL_FAILED = tl.constexpr(int(Roll.FAILED))
_NORM_RTOL = tl.constexpr(NORM_RTOL)
_RHO = tl.constexpr(int(Clip.RHO))
_RHO_WEIGHT = tl.constexpr(int(Clip.RHO_WEIGHT))
_MAX_NORM = tl.constexpr(int(Clip.MAX_NORM))
_UNSCALE = tl.constexpr(int(Clip.UNSCALE))
_RHO_DECAY = tl.constexpr(RHO_DECAY)
_ONE_MINUS_RHO_DECAY = tl.constexpr(1 - RHO_DECAY)
_ONE_WARP = {"num_warps": 1, "enable_fp_fusion": False}


@triton.jit
def _record_decision(decision_ptr, skip, rank):
    """Write whether this step is skipped (skip, int32 0 or 1) and move the counters."""
    tl.store(decision_ptr + SKIP, skip)
    tl.store(decision_ptr + COUNTED, tl.load(decision_ptr + COUNTED) + 1 - skip)
    tl.store(decision_ptr + SKIPPED, tl.load(decision_ptr + SKIPPED) + skip)
    tl.store(decision_ptr + _STREAK, (tl.load(decision_ptr + _STREAK) + 1) * skip)
    tl.store(decision_ptr + BAD_RANK, tl.where(skip != 0, rank, tl.load(decision_ptr + BAD_RANK)))


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _first_rank(condition, TILE: tl.constexpr):
    """First rank where a condition holds, TILE if nowhere."""
    return tl.min(tl.where(condition, tl.arange(0, TILE), TILE))


@triton.jit
def _worst_rank(faults, TILE: tl.constexpr):
    """First rank with an error, or else the first that is flagged; TILE if none is."""
    fatal = _first_rank((faults & ~_NONFINITE) != 0, TILE)
    return tl.where(fatal < TILE, fatal, _first_rank(faults != 0, TILE))


@triton.jit
def _move_average(clip_ptr, entry, value, usable):
    """Running sum of the clipping vector: decayed and moved towards value where value is usable."""
    old = tl.load(clip_ptr + entry)
    decay = tl.full([], _RHO_DECAY, tl.float32)
    one_minus_decay = tl.full([], _ONE_MINUS_RHO_DECAY, tl.float32)
    tl.store(clip_ptr + entry, tl.where(usable, decay * old + one_minus_decay * value, old))


@triton.jit
def _root_mean(squares_ptr, RANKS: tl.constexpr, TILE: tl.constexpr):
    """Root of the mean over ranks of their sums of squares."""
    total = sum_range(squares_ptr, 0, RANKS, TILE)
    return tl.sqrt_rn(tl.div_rn(total, tl.full([], RANKS, tl.float32)))


@kernel
def _decide_averaged_kernel(
    partials_ptr, local_squares_ptr, roll_ptr, decision_ptr, clip_ptr, blocks,
    TRACK_RHO: tl.constexpr, RANKS: tl.constexpr, RANK_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    squares = sum_range(partials_ptr, 0, blocks, TILE)
    finite = squares < float("inf")
    unscale = tl.load(clip_ptr + _UNSCALE)
    norm = tl.sqrt_rn(squares) * tl.abs(unscale)
    scale = tl.div_rn(tl.load(clip_ptr + _MAX_NORM), norm)
    tl.store(clip_ptr + GRAD_SCALE, tl.where(finite & (scale < 1.0), scale, 1.0) * unscale)
    if TRACK_RHO:
        rho = tl.div_rn(_root_mean(local_squares_ptr, RANKS, TILE), norm)
        usable = finite & (rho < float("inf"))
        _move_average(clip_ptr, _RHO, rho, usable)
        _move_average(clip_ptr, _RHO_WEIGHT, tl.full([], 1.0, tl.float32), usable)
    rank = tl.arange(0, RANK_TILE)
    known = rank < RANKS
    row = roll_ptr + rank * _ROLLS
    faults = tl.where(tl.load(row + _ROLL_FAILED, mask=known, other=0.0) != 0.0, _FAILED, 0)
    for column in tl.static_range(0, _ROLL_FAILED):
        unlike = known & (tl.load(row + column, mask=known, other=0.0) != tl.load(roll_ptr + column))
        faults |= tl.where(unlike, _SETTINGS, 0)
    bad = _worst_rank(faults, RANK_TILE)
    fault = tl.reduce(faults, 0, _or) | tl.where(finite, 0, _NONFINITE)
    tl.store(decision_ptr + FAULT, fault)
    _record_decision(decision_ptr, tl.where(fault != 0, 1, 0), tl.where(bad < RANK_TILE, bad, -1))


@kernel
def _clip_local_kernel(local_squares_ptr, clip_ptr, RANKS: tl.constexpr, TILE: tl.constexpr):
    norm = _root_mean(local_squares_ptr, RANKS, TILE)
    weight = tl.load(clip_ptr + _RHO_WEIGHT)
    rho = tl.where(weight > 0, tl.div_rn(tl.load(clip_ptr + _RHO), weight), 1.0)
    scale = tl.div_rn(tl.load(clip_ptr + _MAX_NORM) * rho, norm)
    usable = (scale > 0.0) & (scale < 1.0)  # 0 where the norm is inf: it would hide what made it so
    tl.store(clip_ptr + GRAD_SCALE, tl.where(usable, scale, 1.0) * tl.load(clip_ptr + _UNSCALE))


@triton.jit
def _check_sum(messages, words, known):
    """Sum of the words that the check covers, for each of several messages of so many words; 0 if it is intact."""
    checked = messages[:, None] + checked_words(words)[None, :]
    return tl.sum(tl.load(checked, mask=known[:, None], other=0).to(tl.int64), axis=1).to(tl.int32)


@kernel
def _decide_exchanged_kernel(
    received_ptr, headers_ptr, message_words_ptr, decision_ptr, buckets, RANKS: tl.constexpr, TILE: tl.constexpr
):
    rank = tl.arange(0, TILE)
    known = rank < RANKS
    faults = tl.zeros([TILE], tl.int32)
    unequal = tl.zeros([TILE], tl.int32)
    total = tl.zeros([TILE], tl.float32)
    for bucket in range(buckets):
        words = (received_ptr + tl.load(headers_ptr + bucket * RANKS + rank, mask=known, other=0)).to(
            tl.pointer_type(tl.int32)
        )
        first = (received_ptr + tl.load(headers_ptr + bucket * RANKS)).to(tl.pointer_type(tl.int32))
        found = tl.load(words + FLAGS_WORD, mask=known, other=0)
        tags, steps = tl.load(words + TAG_WORD, mask=known, other=0), tl.load(words + STEP_WORD, mask=known, other=0)
        settings = tl.load(words + SETTINGS_WORD, mask=known, other=0)
        found |= tl.where(tags != tl.load(first + TAG_WORD), _LAYOUT, 0)
        found |= tl.where(steps != tl.load(first + STEP_WORD), _STEP, 0)
        found |= tl.where(settings != tl.load(first + SETTINGS_WORD), _SETTINGS, 0)
        alien = tl.load(words + SENDER_WORD, mask=known, other=0) != rank
        alien |= _check_sum(words, tl.load(message_words_ptr + bucket), known) != 0
        faults |= tl.where(known, tl.where(alien, _CORRUPT, found), 0)
        square_bits = tl.load(words + SQUARES_WORD, mask=known, other=0)
        squares = square_bits.to(tl.float32, bitcast=True)
        unlike = (squares != tl.load(first + SQUARES_WORD).to(tl.float32, bitcast=True)) | (squares <= 0)
        unequal |= (known & unlike).to(tl.int32)
        total += squares
    equal = 1 - tl.max(unequal)
    tl.store(decision_ptr + _EQUAL, (tl.load(decision_ptr + _EQUAL) + 1) * equal)
    norm = tl.sum(tl.where(rank == 0, total, 0.0))
    apart = known & ~(tl.abs(total - norm) <= norm * _NORM_RTOL)
    one_norm = tl.where(norm > 0, 1 - tl.max(apart.to(tl.int32)), 0)
    tl.store(decision_ptr + _ONE_NORM, (tl.load(decision_ptr + _ONE_NORM) + 1) * one_norm)
    fault = tl.reduce(faults, 0, _or)
    tl.store(decision_ptr + FAULT, fault)
    tl.store(decision_ptr + SKIP, tl.where(fault != 0, 1, 0))
    tl.store(decision_ptr + BAD_RANK, tl.where(fault != 0, _worst_rank(faults, TILE), tl.load(decision_ptr + BAD_RANK)))


@kernel
def _accept_returned_kernel(
    messages_ptr, tag_ptr, decision_ptr, message_bytes, FIRST: tl.constexpr, RANKS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    rank = tl.arange(0, TILE)
    known = rank < RANKS
    words = (messages_ptr + rank.to(tl.int64) * message_bytes).to(tl.pointer_type(tl.int32))
    step = tl.load(decision_ptr + COUNTED) + tl.load(decision_ptr + SKIPPED)
    if not FIRST:
        step -= 1
    broken = _check_sum(words, message_bytes // 4, known) != 0
    broken |= tl.load(words + TAG_WORD, mask=known, other=0) != tl.load(tag_ptr)
    broken |= tl.load(words + SENDER_WORD, mask=known, other=0) != rank
    broken |= tl.load(words + STEP_WORD, mask=known, other=0) != step
    broken &= known
    damaged = tl.max(broken.to(tl.int32))
    tl.store(decision_ptr + DAMAGED, tl.where(damaged != 0, _DAMAGED, tl.load(decision_ptr + DAMAGED)))
    if FIRST:
        reports = tl.where(broken, 0, tl.load(words + FLAGS_WORD, mask=known, other=0))
        server = _worst_rank(reports & _REPORT, TILE)
        report = tl.sum(tl.where(rank == server, reports, 0))
        tl.store(decision_ptr + FAULT, report & _REPORT)
        _record_decision(decision_ptr, tl.where(report != 0, 1, damaged), report >> _SHIFT)
    else:
        tl.store(decision_ptr + SKIP, tl.load(decision_ptr + SKIP) | damaged)


def _by_ranks(ranks: int) -> dict[str, Any]:
    """Launch constants of passes that hold the checked words of all ranks' messages in registers."""
    return {"num_warps": 4 if ranks <= 8 else 16, "enable_fp_fusion": False}


def decide_averaged(
    partials: Tensor, local_squares: Tensor, roll: Tensor, decision: Tensor, clip: Tensor, track_rho: bool
) -> None:
    """Decide a step whose gradients are alike on all ranks: skip it unless they are finite and all ranks agree.

    Also sets the factor on gradients, min(1, max_norm / |g|) times what undoes the loss scale, and, if asked, moves the
    running rho = sqrt(mean_i |g_i|^2) / |mean_i g_i|. Norms are those of unscaled gradients.

    Args:
        partials: fp32 [blocks of all buckets], from `gradient_norms`, of gradients as they are.
        local_squares: fp32 [ranks], each rank's |g_i|^2 before averaging, unscaled; read only if track_rho.
        roll: fp32 [ranks, len(Roll)], what every rank answered to the roll call.
        decision: int32 [len(Decision)], updated.
        clip: fp32 [len(Clip)], updated.
        track_rho: whether rho moves.
    """
    ranks = local_squares.numel()
    require("decision", decision, torch.int32, len(Decision), partials.device)
    require("clip", clip, torch.float32, len(Clip), partials.device)
    require("roll", roll, torch.float32, ranks * len(Roll), partials.device)
    _decide_averaged_kernel[(1,)](
        partials, local_squares, roll, decision, clip, partials.numel(), track_rho, ranks,
        triton.next_power_of_2(ranks), REDUCE_TILE, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def clip_local(local_squares: Tensor, clip: Tensor) -> None:
    """Set a compressed step's factor on gradients: min(1, max_norm rho / sqrt(mean_i |g_i|^2)), unscaled.

    Nothing is clipped if that is not finite.

    Args:
        local_squares: fp32 [ranks], each rank's |g_i|^2, unscaled.
        clip: fp32 [len(Clip)], updated.
    """
    require("clip", clip, torch.float32, len(Clip), local_squares.device)
    _clip_local_kernel[(1,)](local_squares, clip, local_squares.numel(), REDUCE_TILE, **_ONE_WARP)


def decide_exchanged(received: Tensor, headers: Tensor, message_words: Tensor, decision: Tensor) -> None:
    """Decide a compressed step from the headers of all received messages: one flag on one rank skips it everywhere.

    What ranks must agree on is compared with rank 0's, so that all ranks find the same. Only a corrupted message is
    seen by its receiver alone: servers report what they found, and `accept_returned` moves the counters.

    Args:
        received: uint8, the received messages of all buckets.
        headers: int64 [buckets, ranks], where in `received` each message starts.
        message_words: int32 [buckets], 32-bit words of a message.
        decision: int32 [len(Decision)]: SKIP, FAULT, BAD_RANK, EQUAL and ONE_NORM are updated.
    """
    require("decision", decision, torch.int32, len(Decision), received.device)
    buckets, ranks = headers.shape
    require("message_words", message_words, torch.int32, buckets, received.device)
    _decide_exchanged_kernel[(1,)](
        received, headers, message_words, decision, buckets, ranks, triton.next_power_of_2(ranks), **_by_ranks(ranks)
    )


def accept_returned(messages: Tensor, tag: Tensor, decision: Tensor, first: bool) -> None:
    """Check what servers sent back for one bucket, and with the first bucket settle the step by what they report.

    If a message is not what its server sent, this rank skips this bucket and those after it, and tells the others in
    its next messages: its parameters are no longer theirs.

    Args:
        messages: uint8 [ranks, message bytes], message r from server r.
        tag: int32 [1], the bucket's layout tag.
        decision: int32 [len(Decision)], updated.
        first: whether it is the first bucket of the step.
    """
    ranks, message_bytes = messages.shape
    require("decision", decision, torch.int32, len(Decision), messages.device)
    require("tag", tag, torch.int32, 1, messages.device)
    _accept_returned_kernel[(1,)](
        messages, tag, decision, message_bytes, first, ranks, triton.next_power_of_2(ranks), **_by_ranks(ranks)
    )
