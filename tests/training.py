"""Small trainings that tests share: parameters and gradients that depend on seeds alone."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onebit_triton import OneBitLamb

SHAPES = [(33, 7), (5,), (1,), (130,), (64, 3), (2, 3, 4)]
"""Odd sizes; with blocks of 64 elements 12 blocks, the last of most tensors partly empty."""


def parameters(dtype: torch.dtype = torch.float32, shapes: list[tuple[int, ...]] = SHAPES) -> list[torch.nn.Parameter]:
    """The same parameters on every rank."""
    generator = torch.Generator().manual_seed(1)
    return [torch.nn.Parameter((0.1 * torch.randn(s, generator=generator)).to(dtype)) for s in shapes]


def gradients(step: int, rank: int, params: list[Any]) -> list[Tensor]:
    """Gradients of one rank in one step: a signal that all ranks share, and noise of their own."""
    signal = torch.Generator().manual_seed(100)
    noise = torch.Generator().manual_seed(1000 + 17 * step + rank)
    return [
        (torch.randn(p.shape, generator=signal) + torch.randn(p.shape, generator=noise)).to(p.dtype).mul_(0.01)
        for p in params
    ]


def set_gradients(params: list[Any], grads: list[Tensor]) -> None:
    """Give parameters their gradients."""
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()


def vector(params: list[Any]) -> np.ndarray:
    """All parameters as one fp32 array."""
    return torch.cat([p.detach().reshape(-1).float() for p in params]).numpy().copy()


def two_groups(params: list[Any], **options: Any) -> OneBitLamb:
    """An optimizer with two groups of unlike hyperparameters, several buckets of small blocks."""
    defaults: dict[str, Any] = {"lr": 0.01, "freeze_step": 5, "block_elements": 64, "bucket_elements": 512}
    groups = [
        {"params": params[:3], "betas": (0.7, 0.95), "weight_decay": 0.0, "max_coeff": 0.5, "factor_max": 1.3},
        {"params": params[3:], "lr": 0.003, "eps": 1e-6, "min_coeff": 0.2, "coeff_beta": 0.6, "factor_threshold": 0.3},
    ]
    return OneBitLamb(groups, **(defaults | options))


@contextmanager
def logged() -> Iterator[list[str]]:
    """What the library logs on this rank meanwhile, from INFO on."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("onebit_triton")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
