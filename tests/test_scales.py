"""What a sign stands for: where few elements are far larger than the others, "rms" is noticed, and "l1" holds."""

from __future__ import annotations

import pytest
import torch

from benchmarks.convergence.local_ranks import Replicas
from onebit_triton import OneBitLamb

from .training import logged

ELEMENTS, RANKS, FREEZE = 4096, 2, 3


def train(steps: int, density: float, **options: str) -> tuple[Replicas, list[str]]:
    """Two ranks with noisy gradients that are 1000 times as large in a share of the elements."""
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.ones(ELEMENTS))
    size = torch.where(torch.arange(ELEMENTS) < density * ELEMENTS, 1.0, 1e-3)
    replicas = Replicas(
        [param], RANKS, lambda own: OneBitLamb(own, lr=0.01, freeze_step=FREEZE, block_elements=64, **options)
    )
    with logged() as records:
        for _ in range(steps):
            replicas.step([[torch.randn(ELEMENTS) * size] for _ in range(RANKS)])
    return replicas, records


@pytest.mark.parametrize("backend", ["torch", "inductor"])
def test_a_momentum_that_is_too_unequal_is_noticed_at_the_switch(backend: str) -> None:
    replicas, records = train(FREEZE + 1, 0.01, backend=backend)
    (warning,) = [line for line in records if 'scale="l1"' in line]
    assert "step 3: compression leaves 1.3" in warning
    optimizer = replicas.optimizers[0]
    assert 1.2 < optimizer.metrics()["error_ratio"] < 2**0.5
    with logged() as more:
        optimizer.metrics()
    assert not more, "once is enough"


def test_metrics_notice_it_later() -> None:
    replicas, records = train(FREEZE + 1, 1.0)
    assert not any("l1" in line for line in records)
    size = torch.where(torch.arange(ELEMENTS) < 40, 1.0, 1e-3)
    replicas.step([[torch.randn(ELEMENTS) * size * 1e4] for _ in range(RANKS)])
    with logged() as records:
        assert replicas.optimizers[0].metrics()["error_ratio"] > 1.2
    assert any('scale="l1"' in line for line in records)


@pytest.mark.parametrize("backend", ["torch", "inductor"])
@pytest.mark.parametrize("density", [0.01, 1.0])
def test_l1_scales_leave_less_than_there_was(backend: str, density: float) -> None:
    replicas, records = train(FREEZE + 5, density, backend=backend, scale="l1")
    assert not any("l1" in line for line in records)
    bucket = replicas.optimizers[0]._replica.buckets[0]
    assert bucket.x is not None
    scale = bucket.x.abs().mean()
    assert float(bucket.x_scale) == pytest.approx(float(scale), rel=1e-5)
    assert float((bucket.x - scale * bucket.x.sign()).norm()) < float(bucket.x.norm())
