"""What kernels, launchers and twins share: column numbers, the message header, the tables of tensors and blocks.

Nothing here needs Triton. A *segment* is one parameter tensor, a *block* the ``block_elements`` that one kernel
program owns; segments start on a block boundary, so a block belongs to exactly one segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag

import torch
from torch import Tensor


class Header(IntEnum):
    """Words of the header that every message starts with: fp32 SCALE and SQUARES, all others int32."""

    SCALE = 0
    FLAGS = 1  # a worker's: what is wrong, as in Fault; a server's: what it found, and in which rank's messages
    SQUARES = 2  # sum of squares of the sender's gradient
    TAG = 3  # of layout and bucket
    STEP = 4  # steps taken before this one, skipped ones included
    SETTINGS = 5  # fingerprint of the hyperparameters
    SENDER = 6
    CHECK = 7  # minus the sum of the header's other words and of SAMPLES words of the planes: they add up to 0


HEADER_BYTES = 4 * len(Header)

SAMPLES = 56
"""Words of a message's planes, spread evenly from the first to the last, that take part in its check."""


class Fault(IntFlag):
    """Why a step is skipped. All but NONFINITE are errors on every rank."""

    NONFINITE = 1  # the sender's gradient, or what it adds up to, is not finite
    FAILED = 2  # the sender could not take the step
    DAMAGED = 4  # what the sender received in its last step was corrupted, so its parameters are not those of others
    LAYOUT = 8  # another layout than rank 0's
    STEP = 16  # another step than rank 0's
    SETTINGS = 32  # other hyperparameters than rank 0's
    CORRUPT = 64  # a message that does not add up, or is not from whom it should be


SERVER_RANK_SHIFT = 8
"""A server's FLAGS are Fault | rank << SERVER_RANK_SHIFT."""


class Stamp(IntEnum):
    """What a rank puts into all its messages, int32 [len(Stamp)]."""

    SENDER = 0
    SETTINGS = 1


class Roll(IntEnum):
    """Columns of the roll call of a warmup step, fp32 [ranks, len(Roll)], summed along with the first gradients.

    Every rank fills its own row and leaves zeros in the others. Integers up to 255 survive any dtype of gradients.
    """

    SETTINGS0 = 0  # the four bytes of the fingerprint of hyperparameters and steps
    SETTINGS1 = 1
    SETTINGS2 = 2
    SETTINGS3 = 3
    FAILED = 4  # 1: this rank cannot take the step


class Hyper(IntEnum):
    """Columns of the hyperparameter table, fp32 [segments, len(Hyper)]; written by the host, read by kernels."""

    LR = 0
    BETA1 = 1
    ONE_MINUS_BETA1 = 2
    BETA2 = 3
    ONE_MINUS_BETA2 = 4
    EPS = 5
    WEIGHT_DECAY = 6
    MIN_COEFF = 7
    MAX_COEFF = 8
    COEFF_BETA = 9
    ONE_MINUS_COEFF_BETA = 10
    FACTOR_MIN = 11
    FACTOR_MAX = 12
    THRESHOLD_LOW = 13  # 1 - factor_threshold
    THRESHOLD_HIGH = 14  # 1 + factor_threshold
    MAX_RATE_RATIO = 15  # inf when off
    COEFF_BIAS_CORRECTION = 16  # 1 or 0


class Rate(IntEnum):
    """Columns of the layer table, fp32 [segments, len(Rate)]; written by kernels, one row per parameter tensor."""

    STEP = 0  # counted steps k
    COEFF = 1  # C, running trust ratio, starts at 0
    COEFF_CORRECTION = 2  # 1 - coeff_beta^k
    CORRECTION1 = 3  # 1 - beta1^k
    CORRECTION2 = 4  # 1 - beta2^k
    SCALING = 5  # s_j
    FACTOR = 6  # f of the last step
    COUNT = 7  # elements that take part in compression
    COEFF_USED = 8  # trust ratio of the last step: c, or C f
    RATE = 9  # lr times COEFF_USED: what the update is multiplied by
    UNCLIPPED = 10  # c, or f, of the last step before its bounds; only to be seen


class Decision(IntEnum):
    """Entries of the decision vector, int32: alike on every rank, written once a step, read by every pass."""

    SKIP = 0  # 1: this step changes nothing
    COUNTED = 1  # steps that were applied
    SKIPPED = 2  # steps that were not
    STREAK = 3  # skipped steps in a row
    BAD_RANK = 4  # first rank because of which the last skipped step was skipped, -1 if unknown
    FAULT = 5  # why this step is skipped, as in Fault; 0 if it is not
    EQUAL = 6  # steps in a row in which all ranks had the same sums of squares
    ONE_NORM = 7  # steps in a row in which the gradients of all ranks had one norm, to NORM_RTOL
    DAMAGED = 8  # Fault.DAMAGED if what came back from a server was corrupted: only this rank knows, and tells next


class Clip(IntEnum):
    """Entries of the clipping vector, fp32."""

    GRAD_SCALE = 0  # factor on every gradient of this step: UNSCALE and clipping
    RHO = 1  # running sum for rho = sqrt(mean_i |g_i|^2) / |mean_i g_i|
    RHO_WEIGHT = 2  # 1 - decay^k, divides RHO
    MAX_NORM = 3  # max_grad_norm, inf when off
    UNSCALE = 4  # 1 over the loss scale, negative where the objective is maximized


RHO_DECAY = 0.99
"""Decay of the running rho."""

NORM_RTOL = 1e-5
"""Relative difference of squared norms up to which they count as one: clipping by a rank's own norm comes closer."""


@dataclass(frozen=True)
class BlockMap:
    """Which block of a bucket belongs to which segment. Blocks that pad the bucket belong to its last segment.

    Attributes:
        segment: int32 [blocks], the segment of each block (numbered within the bucket).
        first_block: int32 [segments + 1], where each segment's blocks start.
        numel: int64 [segments], elements of each parameter.
        sizes: the same as Python ints.
        starts: first element of each segment in the bucket, Python ints.
        block_elements: elements of a block, a power of two, at least 64.
    """

    segment: Tensor
    first_block: Tensor
    numel: Tensor
    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    block_elements: int

    @property
    def blocks(self) -> int:
        """Number of blocks in the bucket."""
        return self.segment.numel()

    @property
    def segments(self) -> int:
        """Number of parameter tensors in the bucket."""
        return len(self.sizes)

    def rows(self, table: Tensor, *columns: int) -> Tensor:
        """Columns of a per-segment table spread over the blocks, [blocks, columns]; for the twins."""
        return table[:, columns].index_select(0, self.segment)

    def sum(self, partials: Tensor) -> Tensor:
        """Sum of one value per block over each segment, [segments], in block order; for the twins."""
        return torch.segment_reduce(partials, "sum", offsets=self.first_block.long(), unsafe=True)

    def max(self, partials: Tensor) -> Tensor:
        """Maximum of one value per block over each segment, [segments]; for the twins."""
        return torch.segment_reduce(partials, "max", offsets=self.first_block.long(), unsafe=True)


def flat(tensor: Tensor) -> Tensor:
    """One-dimensional view of a dense tensor in memory order (no copy, whatever its strides)."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


class TensorTable:
    """The tensors of a bucket's segments, where they are: a table of addresses for kernels, a list for twins.

    Addresses are copied to the device only when one of them changed, without synchronising.

    Attributes:
        addresses: int64 [segments] on the device; 0 stands for a missing tensor, which reads as zeros.
        dtype: element type of all tensors.
        aligned: whether every address is a multiple of 16 bytes.
        tensors: what it points at, while it does.
    """

    def __init__(self, segments: int, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.aligned = True
        self.addresses = torch.zeros(segments, dtype=torch.int64, device=device)
        self.tensors: list[Tensor | None] = [None] * segments
        self._host: list[int] = [0] * segments

    def set(self, tensors: Sequence[Tensor | None]) -> None:
        """Point the table at dense tensors (or None), one per segment; keeps them alive until `release`.

        Raises:
            RuntimeError: if addresses changed while a CUDA graph is captured, which would repeat the old ones.
        """
        self.tensors = list(tensors)
        host = [0 if t is None else t.data_ptr() for t in tensors]
        if host != self._host:
            if self.addresses.is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "A CUDA graph needs parameters and gradients that stay where they are: take one step with them "
                    "before the capture, keep zero_grad(set_to_none=False), and let backward write in place."
                )
            self._host = host
            self.aligned = all(address % 16 == 0 for address in host)
            staged = torch.tensor(host, dtype=torch.int64, pin_memory=self.addresses.is_cuda)
            self.addresses.copy_(staged, non_blocking=True)

    def release(self) -> None:
        """Let go of the tensors; the table is of no use until the next `set`."""
        self.tensors = []

    def gather(self, blocks: BlockMap) -> Tensor:
        """Copy of all tensors as fp32 [blocks, block_elements], zeros in the padding; for the twins."""
        out = torch.zeros(blocks.blocks * blocks.block_elements, dtype=torch.float32, device=self.addresses.device)
        for tensor, start, size in zip(self.tensors, blocks.starts, blocks.sizes, strict=True):
            if tensor is not None:
                out[start : start + size].copy_(flat(tensor))
        return out.view(blocks.blocks, blocks.block_elements)

    def scatter(self, values: Tensor, blocks: BlockMap) -> None:
        """Write fp32 [blocks, block_elements] back to the tensors, rounded to their dtype; for the twins."""
        values = values.view(-1)
        for tensor, start, size in zip(self.tensors, blocks.starts, blocks.sizes, strict=True):
            if tensor is not None:
                flat(tensor).copy_(values[start : start + size])
