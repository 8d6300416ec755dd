"""Stage 2, server: the mean of the ranks' signs on this rank's chunk, its error, and the planes sent back.

    y = mean_i(S_i sign(x_i)) + E,  T = |y| / sqrt(N/n),  planes = sign(y)

The sum runs in rank order; the error E is lazy, like the worker's.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from .common import (
    BAD_RANK,
    FAULT,
    HEADER,
    REDUCE_TILE,
    SKIP,
    is_masked,
    keep_mask,
    kernel,
    launch_constants,
    lazy_error,
    load_scale,
    planes_at_once,
    require,
    require_seal,
    seal,
    signed,
    sum_range,
)
from .tables import HEADER_BYTES, SERVER_RANK_SHIFT

_SHIFT = tl.constexpr(SERVER_RANK_SHIFT)


@kernel
def _reduce_chunk_kernel(
    received_ptr, y_ptr, y_scale_ptr, decision_ptr, message_ptr, partials_ptr, message_bytes,
    RANKS: tl.constexpr, L1: tl.constexpr, BLOCK: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    if tl.load(decision_ptr + SKIP) != 0:
        return
    block = tl.program_id(0).to(tl.int64)
    PLANE: tl.constexpr = BLOCK // 8
    j = tl.arange(0, PLANE)[None, :]
    at = HEADER + block * PLANE
    y_scale = tl.load(y_scale_ptr)
    y_block = y_ptr + block * BLOCK
    packed = tl.zeros([1, PLANE], tl.int32)
    sizes = tl.zeros([1, PLANE], tl.float32)
    for first in tl.static_range(0, 8, PLANES):
        k = first + tl.arange(0, PLANES)[:, None]
        i = k * PLANE + j
        total = tl.zeros([PLANES, PLANE], tl.float32)
        message = received_ptr
        for _ in range(RANKS):
            total += signed(tl.load(message + at + j).to(tl.int32), k, load_scale(message))
            message += message_bytes
        y_old = tl.load(y_block + i)
        y = tl.div_rn(total, tl.full([PLANES, PLANE], RANKS, tl.float32)) + lazy_error(y_old, y_scale)
        y = keep_mask(is_masked(y_old), y_old, y)
        tl.store(y_block + i, y)
        sizes += tl.sum(tl.abs(y) if L1 else y * y, axis=0, keep_dims=True)
        packed |= tl.sum((y >= 0).to(tl.int32) << k, axis=0, keep_dims=True)
    tl.store(message_ptr + at + j, packed.to(tl.uint8))
    tl.store(partials_ptr + block, tl.sum(sizes))


@kernel
def _seal_server_kernel(
    partials_ptr, count_ptr, tag_ptr, stamp_ptr, decision_ptr, message_ptr, y_scale_ptr, blocks, message_bytes,
    L1: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    mean = tl.div_rn(sum_range(partials_ptr, 0, blocks, TILE), tl.maximum(tl.load(count_ptr), 1.0))
    skip = tl.load(decision_ptr + SKIP) != 0
    scale = tl.where(skip, tl.load(y_scale_ptr), mean if L1 else tl.sqrt_rn(mean))
    tl.store(y_scale_ptr, scale)
    report = tl.load(decision_ptr + FAULT) | (tl.load(decision_ptr + BAD_RANK) << _SHIFT)
    seal(
        message_ptr, scale, tl.where(skip, report, 0), tl.full([], 0.0, tl.float32), tag_ptr, stamp_ptr, decision_ptr,
        message_bytes // 4,
    )  # fmt: skip


def reduce_chunk(
    received: Tensor,
    y: Tensor,
    y_scale: Tensor,
    decision: Tensor,
    message: Tensor,
    partials: Tensor,
    block_elements: int,
    l1: bool = False,
) -> None:
    """Form y in place, write its sign planes, and sum y^2 (or |y|) of every block; nothing if the step is skipped.

    Args:
        received: uint8 [ranks, message bytes], message i from rank i.
        y: fp32 [chunk], the last server sum, overwritten by the new one.
        y_scale: fp32 [1], the scale it was sent with.
        decision: int32 [len(Decision)].
        message: uint8 [message bytes]; the planes are overwritten, the header is not.
        partials: fp32 [chunk blocks], overwritten.
        block_elements: elements of a block.
        l1: as in `compress_momentum`.
    """
    ranks, message_bytes = received.shape
    blocks = partials.numel()
    require("received", received, torch.uint8, ranks * message_bytes, decision.device)
    require("partials", partials, torch.float32, blocks, decision.device)
    require("y", y, torch.float32, blocks * block_elements, decision.device)
    require("message", message, torch.uint8, HEADER_BYTES + blocks * block_elements // 8, decision.device)
    _reduce_chunk_kernel[(blocks,)](
        received, y, y_scale, decision, message, partials, message_bytes, ranks, l1, block_elements, planes_at_once(),
        **launch_constants(block_elements),
    )  # fmt: skip


def seal_server(
    partials: Tensor, count: Tensor, tag: Tensor, stamp: Tensor, decision: Tensor, message: Tensor, y_scale: Tensor,
    l1: bool = False,
) -> None:  # fmt: skip
    """Finish the server's message: the scale of y over the chunk, what this rank found in workers' messages.

    If the step is skipped, the scale is left alone.

    Args:
        partials: fp32 [chunk blocks], from `reduce_chunk`; summed in a fixed order.
        count: fp32 [1], elements of the chunk that take part.
        tag: int32 [1], the bucket's layout tag.
        stamp: int32 [len(Stamp)].
        decision: int32 [len(Decision)], from `decide_exchanged`.
        message: uint8 [message bytes], header overwritten.
        y_scale: fp32 [1], overwritten.
        l1: as in `compress_momentum`.
    """
    require_seal(partials.device, count, tag, stamp, decision, y_scale=y_scale)
    _seal_server_kernel[(1,)](
        partials, count, tag, stamp, decision, message, y_scale, partials.numel(), message.numel(), l1,
        REDUCE_TILE, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
