"""What a step decides before it changes anything that ranks share: skip or not, and the clipping factor.

All of it stays on the device: the passes that follow read the decision there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .common import GRAD_SCALE, REDUCE_TILE, kernel, require, sum_range
from .tables import NORM_RTOL, RHO_DECAY, Clip, Decision

_SKIP = tl.constexpr(int(Decision.SKIP))
_COUNTED = tl.constexpr(int(Decision.COUNTED))
_SKIPPED = tl.constexpr(int(Decision.SKIPPED))
_STREAK = tl.constexpr(int(Decision.STREAK))
_BAD_RANK = tl.constexpr(int(Decision.BAD_RANK))
_BAD_TAG = tl.constexpr(int(Decision.BAD_TAG))
_EQUAL = tl.constexpr(int(Decision.EQUAL))
_ONE_NORM = tl.constexpr(int(Decision.ONE_NORM))
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
    tl.store(decision_ptr + _SKIP, skip)
    tl.store(decision_ptr + _COUNTED, tl.load(decision_ptr + _COUNTED) + 1 - skip)
    tl.store(decision_ptr + _SKIPPED, tl.load(decision_ptr + _SKIPPED) + skip)
    tl.store(decision_ptr + _STREAK, (tl.load(decision_ptr + _STREAK) + 1) * skip)
    tl.store(decision_ptr + _BAD_RANK, tl.where(skip != 0, rank, tl.load(decision_ptr + _BAD_RANK)))


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
    partials_ptr, local_squares_ptr, decision_ptr, clip_ptr, blocks,
    TRACK_RHO: tl.constexpr, RANKS: tl.constexpr, TILE: tl.constexpr,
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
    _record_decision(decision_ptr, tl.where(finite, 0, 1), -1)


@kernel
def _clip_local_kernel(local_squares_ptr, clip_ptr, RANKS: tl.constexpr, TILE: tl.constexpr):
    norm = _root_mean(local_squares_ptr, RANKS, TILE)
    weight = tl.load(clip_ptr + _RHO_WEIGHT)
    rho = tl.where(weight > 0, tl.div_rn(tl.load(clip_ptr + _RHO), weight), 1.0)
    scale = tl.div_rn(tl.load(clip_ptr + _MAX_NORM) * rho, norm)
    usable = (scale > 0.0) & (scale < 1.0)  # 0 where the norm is inf: it would hide what made it so
    tl.store(clip_ptr + GRAD_SCALE, tl.where(usable, scale, 1.0) * tl.load(clip_ptr + _UNSCALE))


@kernel
def _decide_exchanged_kernel(
    received_ptr, headers_ptr, tags_ptr, decision_ptr, buckets, RANKS: tl.constexpr, TILE: tl.constexpr
):
    rank = tl.arange(0, TILE)
    known = rank < RANKS
    bad_of_rank = tl.zeros([TILE], tl.int32)
    alien_of_rank = tl.zeros([TILE], tl.int32)
    unequal = tl.zeros([TILE], tl.int32)
    total = tl.zeros([TILE], tl.float32)
    for bucket in range(buckets):
        words = (received_ptr + tl.load(headers_ptr + bucket * RANKS + rank, mask=known, other=0)).to(
            tl.pointer_type(tl.int32)
        )
        first = (received_ptr + tl.load(headers_ptr + bucket * RANKS)).to(tl.pointer_type(tl.float32))
        flagged = tl.load(words + 1, mask=known, other=0) != 0
        tag = tl.load(tags_ptr + bucket)
        alien = known & (tl.load(words + 3, mask=known, other=0) != tag)
        squares = tl.load(words + 2, mask=known, other=0).to(tl.float32, bitcast=True)
        unequal |= (known & ((squares != tl.load(first + 2)) | (squares <= 0))).to(tl.int32)
        total += squares
        alien_of_rank |= alien.to(tl.int32)
        bad_of_rank |= (flagged | alien).to(tl.int32)
    equal = 1 - tl.max(unequal)
    tl.store(decision_ptr + _EQUAL, (tl.load(decision_ptr + _EQUAL) + 1) * equal)
    norm = tl.sum(tl.where(rank == 0, total, 0.0))
    apart = known & ~(tl.abs(total - norm) <= norm * _NORM_RTOL)
    one_norm = tl.where(norm > 0, 1 - tl.max(apart.to(tl.int32)), 0)
    tl.store(decision_ptr + _ONE_NORM, (tl.load(decision_ptr + _ONE_NORM) + 1) * one_norm)
    tl.store(decision_ptr + _BAD_TAG, tl.maximum(tl.load(decision_ptr + _BAD_TAG), tl.max(alien_of_rank)))
    _record_decision(decision_ptr, tl.max(bad_of_rank), tl.min(tl.where(bad_of_rank != 0, rank, TILE)))


def decide_averaged(partials: Tensor, local_squares: Tensor, decision: Tensor, clip: Tensor, track_rho: bool) -> None:
    """Decide a step whose gradients are alike on all ranks: skip it unless their sum of squares is finite.

    Also sets the factor on gradients, min(1, max_norm / |g|) times what undoes the loss scale, and, if asked, moves the
    running rho = sqrt(mean_i |g_i|^2) / |mean_i g_i|. Norms are those of unscaled gradients.

    Args:
        partials: fp32 [blocks of all buckets], from `gradient_norms`, of gradients as they are.
        local_squares: fp32 [ranks], each rank's |g_i|^2 before averaging, unscaled; read only if track_rho.
        decision: int32 [len(Decision)], updated.
        clip: fp32 [len(Clip)], updated.
        track_rho: whether rho moves.
    """
    require("decision", decision, torch.int32, len(Decision), partials.device)
    require("clip", clip, torch.float32, len(Clip), partials.device)
    _decide_averaged_kernel[(1,)](
        partials, local_squares, decision, clip, partials.numel(), track_rho, local_squares.numel(), REDUCE_TILE,
        num_warps=4, enable_fp_fusion=False,
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


def decide_exchanged(received: Tensor, headers: Tensor, tags: Tensor, decision: Tensor) -> None:
    """Decide a compressed step from the headers of all received messages: one flag on one rank skips it everywhere.

    Args:
        received: uint8, the received messages of all buckets.
        headers: int64 [buckets, ranks], where in `received` each message starts.
        tags: int32 [buckets], the layout tag that messages must carry.
        decision: int32 [len(Decision)], updated.
    """
    require("decision", decision, torch.int32, len(Decision), received.device)
    buckets, ranks = headers.shape
    _decide_exchanged_kernel[(1,)](
        received, headers, tags, decision, buckets, ranks, triton.next_power_of_2(ranks), **_ONE_WARP
    )
