"""Parameters and gradients to run on: BERT-Large's shapes for speed, awkward ones between guards for correctness."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

GUARD = 0xFF
"""Byte that fills all memory between tensors: NaN in every float dtype."""

AWKWARD = ((33, 7), (5,), (1,), (130,), (64, 3), (2, 3, 4), (1023,), (1024,), (2500,), (4097,))
"""Tails of every kind, tensors smaller than a block and larger than several."""

TINY = ((9, 8), (8,), (20, 8), (70,))
"""For a CPU, where Triton's interpreter takes its time."""


def bert_large() -> list[tuple[int, ...]]:
    """Shapes of BERT-Large with both heads of its pre-training: 398 tensors, 336,226,108 elements."""
    width, inner = 1024, 4096
    norm = [(width,), (width,)]
    dense = [(width, width), (width,)]
    layer = 4 * dense + norm + [(inner, width), (inner,), (width, inner), (width,)] + norm
    embeddings = [(30522, width), (512, width), (2, width), *norm]
    return embeddings + 24 * layer + dense + [(30522,), *dense, *norm] + [(2, width), (2,)]


def model(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[torch.nn.Parameter]:
    """Parameters of these shapes, with gradients that stay where they are."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device, dtype=dtype)) for shape in shapes]
    for param in params:
        param.grad = 0.01 * torch.randn_like(param)
    return params


class Guarded:
    """Parameters and gradients in one buffer, guard bytes before, between and behind them.

    Args:
        shapes: of the parameters.
        dtype: of both.
        device: of both.
        shift: elements by which every tensor starts behind a 64-byte boundary.

    Attributes:
        params: the parameters; grads: a tensor beside each, to be made its gradient.
    """

    def __init__(
        self, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device, shift: int = 0
    ) -> None:
        places, stop = [], 4096
        for shape in (*shapes, *shapes):
            start = -(-stop // 64) * 64 + shift * dtype.itemsize
            size = torch.Size(shape).numel() * dtype.itemsize
            places.append((start, size, shape))
            stop = start + size + 4096
        self._bytes = torch.full((stop,), GUARD, dtype=torch.uint8, device=device)
        assert self._bytes.data_ptr() % 64 == 0
        self._guards = torch.ones(stop, dtype=torch.bool, device=device)
        tensors = []
        for start, size, shape in places:
            self._guards[start : start + size] = False
            tensors.append(self._bytes[start : start + size].view(dtype).view(shape))
        self.params = [torch.nn.Parameter(tensor) for tensor in tensors[: len(shapes)]]
        self.grads = tensors[len(shapes) :]
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for param in self.params:
                param.copy_(0.1 * torch.randn(param.shape, generator=generator))

    def intact(self) -> bool:
        """Whether no guard byte was overwritten."""
        return bool(((self._bytes == GUARD) | ~self._guards).all())

    def set_gradients(self, step: int) -> None:
        """Fill the gradients of a step and give them to the parameters."""
        for param, grad, value in zip(self.params, self.grads, gradients(step, 0, self.params), strict=True):
            grad.copy_(value)
            param.grad = grad


def gradients(step: int, rank: int, params: Sequence[Tensor]) -> list[Tensor]:
    """Gradients of one rank in one step, the same on every machine: a signal that all ranks share, and noise."""
    signal = torch.Generator().manual_seed(100)
    noise = torch.Generator().manual_seed(1000 + 17 * step + rank)
    return [
        (0.01 * (torch.randn(p.shape, generator=signal) + torch.randn(p.shape, generator=noise))).to(p.dtype)
        for p in params
    ]


def two_groups(params: Sequence[Any]) -> list[dict[str, Any]]:
    """Param groups with unlike hyperparameters."""
    half = len(params) // 2
    return [
        {"params": params[:half], "betas": (0.7, 0.95), "weight_decay": 0.0, "max_coeff": 0.5, "factor_max": 1.3},
        {"params": params[half:], "eps": 1e-6, "min_coeff": 0.2, "coeff_beta": 0.6, "factor_threshold": 0.3},
    ]
