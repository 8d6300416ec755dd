"""Whole optimizer steps on one process, beside torch's AdamW on the same tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from .replicas import BACKENDS, DEVICE, SIZES, in_stage, parameters, wait


def measure(benchmark: Any, step: Callable[[], object], elements: int) -> None:
    """Time a step; elements per second and what it ran on go into the report."""

    def run() -> None:
        step()
        wait()

    benchmark(run)
    benchmark.extra_info.update(
        elements=elements, device=DEVICE.type, torch=torch.__version__, threads=torch.get_num_threads()
    )
    if benchmark.stats is not None:
        benchmark.extra_info["elements_per_second"] = elements / benchmark.stats.stats.median


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stage", ["warmup", "compression"])
def bench_onebit_lamb(benchmark: Any, stage: str, backend: str, size: str) -> None:
    params = parameters(size)
    optimizer = in_stage(stage, backend, params)
    measure(benchmark, optimizer.step, sum(p.numel() for p in params))
    benchmark.extra_info["state_bytes"] = optimizer.metrics()["state_bytes"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def bench_adamw(benchmark: Any, implementation: str, size: str) -> None:
    params = parameters(size)
    optimizer = torch.optim.AdamW(params, **{implementation: True})
    measure(benchmark, optimizer.step, sum(p.numel() for p in params))
