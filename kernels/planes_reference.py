"""Sign planes and message headers in plain torch: the wire format that the Triton kernels share.

Inside a block of B elements with Q = B/8, bit k of byte j is the sign of element k Q + j (1 = non-negative).
A message is a header (`tables.Header`) followed by the planes of one chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .tables import HEADER_BYTES, SAMPLES, Header


def header(messages: Tensor, field: int) -> Tensor:
    """View of one field of the headers of messages [n, bytes], [n] in the field's dtype."""
    dtype = torch.float32 if field in (Header.SCALE, Header.SQUARES) else torch.int32
    return messages[:, 4 * field : 4 * field + 4].view(dtype).squeeze(1)


def planes(messages: Tensor) -> Tensor:
    """View of the sign planes of messages [n, bytes], uint8 [n, chunk/8]."""
    return messages[:, HEADER_BYTES:]


def checked_words(message_words: Tensor) -> Tensor:
    """Which words of messages of so many words, int32 [m], their check covers: int64 [m, len(Header) + SAMPLES]."""
    sample = torch.arange(SAMPLES, device=message_words.device)
    of_planes = sample * (message_words.unsqueeze(1) - len(Header) - 1) // (SAMPLES - 1) + len(Header)
    of_header = torch.arange(len(Header), device=message_words.device).expand(len(message_words), -1)
    return torch.cat((of_header, of_planes), 1)


def check_sum(messages: Tensor) -> Tensor:
    """Sum of the words that the check covers, of each message [n, bytes]; int32 [n], wrapping; 0 if it is intact."""
    words = messages.view(torch.int32)
    size = torch.full((1,), words.shape[1], dtype=torch.int32, device=messages.device)
    return words.index_select(1, checked_words(size)[0]).sum(1, dtype=torch.int32)


def balance(messages: Tensor) -> None:
    """Make each message [n, bytes] pass its check."""
    check = header(messages, Header.CHECK)
    check.zero_()
    check.copy_(-check_sum(messages))


def pack_planes(x: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Signs of x [blocks, B] as planes, [blocks, B/8] bytes in any integer dtype; zero, also negative, is positive."""
    blocks, block_elements = x.shape
    bits = (x >= 0).view(blocks, 8, block_elements // 8).to(dtype)
    out = bits[:, 0]
    for k in range(1, 8):
        out = out | (bits[:, k] << k)
    return out


def plane_bits(packed: Tensor) -> Tensor:
    """The bits of planes, bytes in any integer dtype [blocks, B/8], as bool [blocks, B]."""
    blocks, quarter = packed.shape
    bits = (1 << torch.arange(8, dtype=packed.dtype, device=packed.device)).view(1, 8, 1)
    return (packed.unsqueeze(1) & bits == bits).view(blocks, 8 * quarter)


def unpack_planes(packed: Tensor, scale: Tensor) -> Tensor:
    """Plus or minus scale, fp32 [blocks, B], from planes [blocks, B/8] and scale [blocks, 1]."""
    return torch.where(plane_bits(packed), scale, -scale)


def block_planes(messages: Tensor, block_elements: int) -> tuple[Tensor, Tensor]:
    """Planes uint8 [blocks, B/8] and scale [blocks, 1] of every block of a bucket, from its messages [n, bytes]."""
    packed = planes(messages)
    per_chunk = packed.shape[1] // (block_elements // 8)
    scale = header(messages, 0).repeat_interleave(per_chunk).unsqueeze(1)
    return packed.reshape(-1, block_elements // 8), scale


def sign(x: Tensor) -> Tensor:
    """1 with the sign of x, -1 for a negative zero."""
    return torch.copysign(torch.ones_like(x), x)


def masked_zero(x: Tensor) -> Tensor:
    """Where x is negative zero: the mark of an element that never takes part (masked, or padding)."""
    return (x == 0) & (sign(x) < 0)


def lazy_error(x: Tensor, scale: Tensor) -> Tensor:
    """Error that is left of a compensated value x after it was sent as scale * sign(x); x is not a negative zero."""
    return x - scale * sign(x)


def keep_mask(masked: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """New values, with masked elements left as they were and no other element ever a negative zero."""
    return torch.where(masked, old, new + 0.0)  # -0.0 + 0.0 is 0.0
