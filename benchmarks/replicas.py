"""Optimizers to measure, on one process, with tensors shaped like a transformer's."""

from __future__ import annotations

from typing import Any

import torch

from onebit_triton import OneBitLamb

SIZES = {"64k": 1, "1M": 16, "8M": 128}
"""Name of a size -> number of 256 x 256 matrices; each comes with a vector of 256."""

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

BACKENDS = ["torch", "triton"] if DEVICE.type == "cuda" else ["torch"]
"""The interpreter's time says nothing about speed, so on a CPU there is only plain torch."""


def parameters(size: str) -> list[torch.nn.Parameter]:
    """Parameters with gradients."""
    torch.manual_seed(0)
    shapes = [shape for _ in range(SIZES[size]) for shape in ((256, 256), (256,))]
    params = [torch.nn.Parameter(torch.randn(shape, device=DEVICE) * 0.02) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param) * 0.01
    return params


def in_stage(stage: str, backend: str, params: list[Any]) -> OneBitLamb:
    """An optimizer whose next steps are all in one stage."""
    optimizer = OneBitLamb(params, freeze_step=2 if stage == "compression" else 10**9, backend=backend)
    for _ in range(3):
        optimizer.step()
    assert optimizer.stage == stage
    return optimizer


def wait() -> None:
    """Wait for the device."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
