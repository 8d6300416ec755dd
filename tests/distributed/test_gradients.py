"""Missing gradients, frozen parameters, masks, and rows that never saw a gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from onebit_triton import OneBitLamb

from ..ranks import RankPool
from ..training import gradients, parameters, set_gradients, two_groups, vector


def sparse_rows(rank: int, ranks: int, backend: str, steps: int, masked: bool) -> dict[str, Any]:
    """Train with rows 4.. of a weight that never get a gradient (or that a mask excludes)."""
    params = parameters(shapes=[(8, 40), (20,)])
    initial = params[0].detach().clone()
    mask = torch.ones(8, 1)
    if masked:
        mask[4:] = 0
    groups = [{"params": params[:1], "exp_avg_mask": mask}, {"params": params[1:]}]
    optimizer = OneBitLamb(groups, lr=0.01, freeze_step=4, weight_decay=0.0, backend=backend, block_elements=64)
    for step in range(steps):
        grads = gradients(step, rank, params)
        if not masked or step >= 4:
            grads[0][4:] = 0 if step < 4 else 1e-3
        set_gradients(params, grads)
        optimizer.step()
        if step == 3:
            at_switch = params[0].detach().clone()
    return {
        "initial": initial.numpy(), "switch": at_switch.numpy(), "last": params[0].detach().numpy(),
        "masked": optimizer.metrics()["masked_elements"],
        "exp_avg_sq": optimizer.state_dict()["state"][0]["exp_avg_sq"].numpy(),
    }  # fmt: skip


@pytest.mark.parametrize(("backend", "steps"), [("torch", 20), ("triton", 7)])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_rows_that_never_saw_a_gradient_stay(ranks: RankPool, n: int, backend: str, steps: int) -> None:
    for seen in ranks(n, sparse_rows, backend, steps, False):
        np.testing.assert_array_equal(seen["last"][4:], seen["initial"][4:])
        assert np.abs(seen["last"][:4] - seen["switch"][:4]).min() > 0
        assert np.abs(seen["last"] - seen["switch"]).max() < 0.5
        assert seen["masked"] == 4 * 40


def test_user_mask_holds_in_compression(ranks: RankPool) -> None:
    for seen in ranks(2, sparse_rows, "torch", 20, True):
        np.testing.assert_array_equal(seen["last"][4:], seen["switch"][4:])
        assert np.abs(seen["switch"][4:] - seen["initial"][4:]).min() > 0
        assert seen["masked"] == 4 * 40
        assert (seen["exp_avg_sq"] > 0).all(), "the variance of masked elements was lost"


def missing(rank: int, ranks: int, instead: str) -> np.ndarray:
    params = parameters()
    optimizer = two_groups(params, backend="torch", freeze_step=3)
    for step in range(8):
        set_gradients(params, gradients(step, rank, params))
        if (step + rank) % 2:
            params[2].grad = None if instead == "none" else torch.zeros_like(params[2])
        if step == 4 and rank == 0:
            for p in params:
                p.grad = None if instead == "none" else torch.zeros_like(p)
        optimizer.step()
    return vector(params)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_missing_gradient_counts_as_zero(ranks: RankPool, n: int) -> None:
    without, zeros = ranks(n, missing, "none"), ranks(n, missing, "zero")
    for seen in [*without, *zeros]:
        np.testing.assert_array_equal(seen, without[0])


def zero_tensor(rank: int, ranks: int) -> np.ndarray:
    params = parameters()
    optimizer = two_groups(params, backend="torch", freeze_step=3)
    for step in range(10):
        grads = gradients(step, rank, params)
        grads[1].zero_()
        set_gradients(params, grads)
        optimizer.step()
    assert optimizer.metrics()["scaling"][1] == 1.0
    return vector(params)


@pytest.mark.parametrize("n", [1, 2])
def test_tensor_without_momentum(ranks: RankPool, n: int) -> None:
    for seen in ranks(n, zero_tensor):
        assert np.isfinite(seen).all()


def everything_zero(rank: int, ranks: int) -> np.ndarray:
    params = parameters()
    optimizer = OneBitLamb(params, freeze_step=2, weight_decay=0.0, backend="torch")
    before = vector(params)
    for _ in range(6):
        optimizer.step()
    np.testing.assert_array_equal(before, vector(params))
    return before


def test_no_gradient_anywhere(ranks: RankPool) -> None:
    ranks(2, everything_zero)


def nothing_but_empty(rank: int, ranks: int, backend: str) -> None:
    """Nothing to do is done on all ranks alike."""
    params = parameters(shapes=[(0,), (3, 0)])
    optimizer = OneBitLamb(params, freeze_step=2, backend=backend)
    for _ in range(8):
        optimizer.step()
    assert optimizer.stage == "compression"
    metrics = optimizer.metrics()
    assert (metrics["elements"], metrics["step"]) == (0, 8)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("n", [1, 2])
def test_nothing_but_empty_parameters(ranks: RankPool, n: int, backend: str) -> None:
    ranks(n, nothing_but_empty, backend)


def frozen(rank: int, ranks: int) -> bool:
    params = parameters()
    params[4].requires_grad_(False)
    before = params[4].detach().clone()
    optimizer = two_groups(params, backend="torch", freeze_step=3)
    for step in range(8):
        grads = gradients(step, rank, params)
        for i, (p, g) in enumerate(zip(params, grads, strict=True)):
            p.grad = None if i == 4 else g
        optimizer.step()
    return torch.equal(before, params[4])


def test_frozen_parameter_stays(ranks: RankPool) -> None:
    assert all(ranks(2, frozen))
