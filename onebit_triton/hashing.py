"""Hashes of what tensors hold: to compare replicas, and to find out whether a checkpoint is what was saved."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .kernels.tables import flat

PIECE = 1 << 20
"""Elements that are hashed at a time: a hash takes 8 bytes and more for each."""

MULTIPLIER = 0x5851F42D4C957F2D
"""Odd, so that no bit of a word is lost."""


def words_of(tensor: Tensor) -> Tensor:
    """The bits of a dense tensor in memory order, as int32 or int16."""
    return flat(tensor).view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def hash_bits(tensor: Tensor) -> Tensor:
    """Hash of all bits and their places, int64 []; stays on the device. Any single word that differs changes it."""
    words = words_of(tensor)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), PIECE):
        part = words[start : start + PIECE].to(torch.int64)
        places = torch.arange(start, start + part.numel(), device=tensor.device)
        total += (part * (places * MULTIPLIER | 1)).sum()  # wraps, on every device alike
    return total


def hash_values(tensors: Iterable[Tensor]) -> list[int]:
    """Hash of the fp32 values of each tensor, whatever its memory order (waits for the devices)."""
    found = [hash_bits(tensor.to(torch.float32).contiguous()).cpu() for tensor in tensors]
    return torch.stack(found).tolist() if found else []
