"""Device functions and launch constants that the Triton kernels share.

Rules that hold for every kernel: program ids are 64-bit before they touch a pointer, hyperparameters are loaded from
tables (never compiled in), division and root round to nearest, no fused multiply-add, no float atomics, no autotune:
every rank must compute the same bits.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tables import HEADER_BYTES, SAMPLES, Clip, Decision, Header, Hyper, Rate, Stamp, TensorTable

LR = tl.constexpr(int(Hyper.LR))
BETA1 = tl.constexpr(int(Hyper.BETA1))
ONE_MINUS_BETA1 = tl.constexpr(int(Hyper.ONE_MINUS_BETA1))
BETA2 = tl.constexpr(int(Hyper.BETA2))
ONE_MINUS_BETA2 = tl.constexpr(int(Hyper.ONE_MINUS_BETA2))
EPS = tl.constexpr(int(Hyper.EPS))
WEIGHT_DECAY = tl.constexpr(int(Hyper.WEIGHT_DECAY))
MIN_COEFF = tl.constexpr(int(Hyper.MIN_COEFF))
MAX_COEFF = tl.constexpr(int(Hyper.MAX_COEFF))
COEFF_BETA = tl.constexpr(int(Hyper.COEFF_BETA))
ONE_MINUS_COEFF_BETA = tl.constexpr(int(Hyper.ONE_MINUS_COEFF_BETA))
FACTOR_MIN = tl.constexpr(int(Hyper.FACTOR_MIN))
FACTOR_MAX = tl.constexpr(int(Hyper.FACTOR_MAX))
THRESHOLD_LOW = tl.constexpr(int(Hyper.THRESHOLD_LOW))
THRESHOLD_HIGH = tl.constexpr(int(Hyper.THRESHOLD_HIGH))
MAX_RATE_RATIO = tl.constexpr(int(Hyper.MAX_RATE_RATIO))
COEFF_BIAS_CORRECTION = tl.constexpr(int(Hyper.COEFF_BIAS_CORRECTION))
HYPERS = tl.constexpr(len(Hyper))

STEP = tl.constexpr(int(Rate.STEP))
COEFF = tl.constexpr(int(Rate.COEFF))
COEFF_CORRECTION = tl.constexpr(int(Rate.COEFF_CORRECTION))
CORRECTION1 = tl.constexpr(int(Rate.CORRECTION1))
CORRECTION2 = tl.constexpr(int(Rate.CORRECTION2))
SCALING = tl.constexpr(int(Rate.SCALING))
FACTOR = tl.constexpr(int(Rate.FACTOR))
COUNT = tl.constexpr(int(Rate.COUNT))
COEFF_USED = tl.constexpr(int(Rate.COEFF_USED))
RATE = tl.constexpr(int(Rate.RATE))
UNCLIPPED = tl.constexpr(int(Rate.UNCLIPPED))
RATES = tl.constexpr(len(Rate))

SKIP = tl.constexpr(int(Decision.SKIP))
COUNTED = tl.constexpr(int(Decision.COUNTED))
SKIPPED = tl.constexpr(int(Decision.SKIPPED))
BAD_RANK = tl.constexpr(int(Decision.BAD_RANK))
FAULT = tl.constexpr(int(Decision.FAULT))
DAMAGED = tl.constexpr(int(Decision.DAMAGED))
GRAD_SCALE = tl.constexpr(int(Clip.GRAD_SCALE))
HEADER = tl.constexpr(HEADER_BYTES)
HEADER_WORDS = tl.constexpr(len(Header))
SAMPLED = tl.constexpr(SAMPLES)
SCALE_WORD = tl.constexpr(int(Header.SCALE))
FLAGS_WORD = tl.constexpr(int(Header.FLAGS))
SQUARES_WORD = tl.constexpr(int(Header.SQUARES))
TAG_WORD = tl.constexpr(int(Header.TAG))
STEP_WORD = tl.constexpr(int(Header.STEP))
SETTINGS_WORD = tl.constexpr(int(Header.SETTINGS))
SENDER_WORD = tl.constexpr(int(Header.SENDER))
CHECK_WORD = tl.constexpr(int(Header.CHECK))
_SENDER = tl.constexpr(int(Stamp.SENDER))
_SETTINGS = tl.constexpr(int(Stamp.SETTINGS))

NEGATIVE_ZERO = tl.constexpr(-(2**31))
"""Bits of fp32 -0.0 as int32: the mark of an element that never takes part."""

REDUCE_TILE = 1024
"""Partial results that a reducing program reads at a time; fixed, so that sums run in one order everywhere."""

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, decided by TRITON_INTERPRET when they were imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def launch_constants(block_elements: int) -> dict[str, Any]:
    """Options of every launch over blocks: 4 elements a thread and plane, warps from the block size alone."""
    return {"num_warps": max(1, block_elements // 1024), "enable_fp_fusion": False}


def tile_elements(block_elements: int) -> int:
    """Elements that an elementwise pass handles at a time; the interpreter pays per operation, so it takes all."""
    return block_elements if interpreted() else max(64, block_elements // 8)


def planes_at_once() -> int:
    """Sign planes that a pass handles at a time: one keeps registers few; the interpreter pays per operation."""
    return 8 if interpreted() else 1


def require(name: str, tensor: Tensor, dtype: torch.dtype, numel: int, device: torch.device) -> None:
    """Raise ValueError unless a tensor has this dtype and element count, is contiguous and on this device."""
    if tensor.dtype != dtype or tensor.numel() != numel or tensor.device != device or not tensor.is_contiguous():
        raise ValueError(
            f"Invalid {name}: must be contiguous {dtype} with {numel} elements on {device}, "
            f"got {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}"
        )


def require_bucket(elements: int, device: torch.device, **states: Tensor | None) -> None:
    """Raise ValueError unless every state that is given is fp32 over the bucket."""
    for name, state in states.items():
        if state is not None:
            require(name, state, torch.float32, elements, device)


def require_parameters(params: TensorTable) -> None:
    """Raise ValueError unless parameters are fp32: passes read the masters of others."""
    if params.dtype != torch.float32:
        raise ValueError(f"Invalid params: must be torch.float32, masters where parameters are not, got {params.dtype}")


def require_messages(elements: int, device: torch.device, **sets: Tensor) -> None:
    """Raise ValueError unless every set of messages, uint8 [ranks, bytes], is of a bucket of so many elements."""
    for name, messages in sets.items():
        require(name, messages, torch.uint8, messages.shape[0] * HEADER_BYTES + elements // 8, device)


def require_seal(
    device: torch.device, count: Tensor, tag: Tensor, stamp: Tensor, decision: Tensor, **scales: Tensor
) -> None:
    """Raise ValueError unless count and scales are fp32 [1], tag is int32 [1], stamp and decision are complete."""
    require("tag", tag, torch.int32, 1, device)
    require("stamp", stamp, torch.int32, len(Stamp), device)
    require("decision", decision, torch.int32, len(Decision), device)
    for name, scalar in {"count": count, **scales}.items():
        require(name, scalar, torch.float32, 1, device)


kernel = partial(
    triton.jit,
    do_not_specialize=("blocks", "blocks_per_chunk", "buckets"),
    do_not_specialize_on_alignment=(
        "rates_ptr", "partials_ptr", "tag_ptr", "tags_ptr", "count_ptr", "x_scale_ptr", "y_scale_ptr",
    ),
)  # fmt: skip
"""Decorator of every kernel: what differs from bucket to bucket must not compile it again. message_bytes may: that it
is a multiple of 16 is what gives wide accesses to planes."""


@triton.jit
def as_pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Typed pointer from an int64 address; ALIGNED promises 16 bytes, which gives 128-bit accesses."""
    pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def load_segment(address, offset, i, remaining, BLOCK: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Elements offset + i of a parameter or gradient as fp32; zeros behind its end and for address 0.

    Only a segment's last block pays for a mask: elsewhere the branch keeps wide loads.
    """
    value = tl.zeros(i.shape, tl.float32)
    if address != 0:
        pointer = as_pointer(address, DTYPE, ALIGNED) + offset
        if remaining >= BLOCK:
            value = tl.load(pointer + i).to(tl.float32)
        else:
            value = tl.load(pointer + i, mask=i < remaining, other=0.0).to(tl.float32)
    return value


@triton.jit
def store_segment(
    address, offset, i, remaining, value, BLOCK: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr
):
    """Store fp32 values to elements offset + i of a parameter, rounded to its dtype."""
    if address != 0:
        pointer = as_pointer(address, DTYPE, ALIGNED) + offset
        if remaining >= BLOCK:
            tl.store(pointer + i, value.to(DTYPE))
        else:
            tl.store(pointer + i, value.to(DTYPE), mask=i < remaining)


@triton.jit
def segment_of_block(segment_ptr, first_block_ptr, numel_ptr, block, BLOCK: tl.constexpr):
    """Segment of a block, where the block starts in it, and how many of its elements are left from there."""
    segment = tl.load(segment_ptr + block).to(tl.int64)
    offset = (block - tl.load(first_block_ptr + segment).to(tl.int64)) * BLOCK
    remaining = tl.load(numel_ptr + segment) - offset
    return segment, offset, remaining


@triton.jit
def load_scale(message_ptr):
    """The fp32 scale at the head of a message."""
    return tl.load(message_ptr.to(tl.pointer_type(tl.float32)))


@triton.jit
def block_of_messages(messages_ptr, block, blocks_per_chunk, message_bytes, BLOCK: tl.constexpr):
    """Pointer to a block's planes in the bucket's messages, and the pointer to the message it lies in."""
    chunk = block // blocks_per_chunk
    message = messages_ptr + chunk * message_bytes
    return message + HEADER + (block - chunk * blocks_per_chunk) * (BLOCK // 8), message


@triton.jit
def signed(plane_bytes, k, scale):
    """Plus or minus scale for the elements of plane k."""
    return tl.where(((plane_bytes >> k) & 1) != 0, scale, -scale)


@triton.jit
def is_masked(x):
    """Whether x is negative zero: the mark of an element that never takes part."""
    return x.to(tl.int32, bitcast=True) == NEGATIVE_ZERO


@triton.jit
def lazy_error(x, scale):
    """Error that is left of a compensated value x after it was sent as scale * sign(x)."""
    return x - tl.where(x >= 0, scale, -scale)


@triton.jit
def keep_mask(masked, old, new):
    """New values, with masked elements left as they were and no other element ever a negative zero."""
    return tl.where(masked, old, tl.where(new == 0, 0.0, new))


@triton.jit
def load_corrections(hyper_ptr, rates_ptr, ADVANCE: tl.constexpr):
    """Bias corrections of m and v; ADVANCE counts the step that is being taken."""
    correction1 = tl.load(rates_ptr + CORRECTION1)
    correction2 = tl.load(rates_ptr + CORRECTION2)
    if ADVANCE:
        correction1 = tl.load(hyper_ptr + BETA1) * correction1 + tl.load(hyper_ptr + ONE_MINUS_BETA1)
        correction2 = tl.load(hyper_ptr + BETA2) * correction2 + tl.load(hyper_ptr + ONE_MINUS_BETA2)
    return correction1, correction2


@triton.jit
def corrected(x, correction, BIAS_CORRECTION: tl.constexpr):
    """x over its bias correction, if there is one: a rounded division is dear."""
    if BIAS_CORRECTION:
        x = tl.div_rn(x, correction)
    return x


@triton.jit
def last_block_first():
    """The block of a program that walks backwards: what the pass before it touched last is still in the cache."""
    return tl.num_programs(0) - 1 - tl.program_id(0).to(tl.int64)


@triton.jit
def sum_range(values_ptr, start, stop, TILE: tl.constexpr):
    """Sum of values[start:stop] in a fixed order, fp32."""
    lane = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float32)
    for at in range(start, stop, TILE):
        total += tl.load(values_ptr + at + lane, mask=at + lane < stop, other=0.0)
    return tl.sum(total)


@triton.jit
def bounded_trust_ratio(p_norm, u_norm, hyper):
    """|p| / |u| of a segment before and within its bounds; 1 where either norm is 0."""
    still = (p_norm == 0) | (u_norm == 0)
    unclipped = tl.where(still, 1.0, tl.div_rn(p_norm, u_norm))
    c = tl.minimum(tl.maximum(unclipped, tl.load(hyper + MIN_COEFF)), tl.load(hyper + MAX_COEFF))
    return unclipped, tl.where(still, 1.0, c)


@triton.jit
def max_range(values_ptr, start, stop, TILE: tl.constexpr):
    """Maximum of values[start:stop], none of them negative."""
    lane = tl.arange(0, TILE)
    best = tl.zeros([TILE], tl.float32)
    for at in range(start, stop, TILE):
        best = tl.maximum(best, tl.load(values_ptr + at + lane, mask=at + lane < stop, other=0.0))
    return tl.max(best)


@triton.jit
def checked_words(words):
    """Which words of a message of so many words its check covers: the header, and some of the planes; int64."""
    lane = tl.arange(0, HEADER_WORDS + SAMPLED).to(tl.int64)
    of_planes = (lane - HEADER_WORDS) * (words - HEADER_WORDS - 1) // (SAMPLED - 1) + HEADER_WORDS
    return tl.where(lane < HEADER_WORDS, lane, of_planes)


@triton.jit
def seal(message, scale, flags, squares, tag_ptr, stamp_ptr, decision_ptr, words):
    """Write the header of a message of so many words, whose planes are there.

    Sums are in int64, of which the lower half counts: the interpreter refuses to wrap.
    """
    to = message.to(tl.pointer_type(tl.int32))
    scale_bits, square_bits = scale.to(tl.int32, bitcast=True), squares.to(tl.int32, bitcast=True)
    tag, settings, sender = tl.load(tag_ptr), tl.load(stamp_ptr + _SETTINGS), tl.load(stamp_ptr + _SENDER)
    step = tl.load(decision_ptr + COUNTED) + tl.load(decision_ptr + SKIPPED)
    checked = checked_words(words)
    planes = tl.sum(tl.load(to + checked, mask=checked >= HEADER_WORDS, other=0).to(tl.int64))
    tl.store(to + SCALE_WORD, scale_bits)
    tl.store(to + FLAGS_WORD, flags)
    tl.store(to + SQUARES_WORD, square_bits)
    tl.store(to + TAG_WORD, tag)
    tl.store(to + STEP_WORD, step)
    tl.store(to + SETTINGS_WORD, settings)
    tl.store(to + SENDER_WORD, sender)
    check = planes + scale_bits.to(tl.int64) + flags.to(tl.int64) + square_bits.to(tl.int64) + tag.to(tl.int64)
    check += step.to(tl.int64) + settings.to(tl.int64) + sender.to(tl.int64)
    tl.store(to + CHECK_WORD, (-check).to(tl.int32))
