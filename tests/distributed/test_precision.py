"""Loss scalers over ranks: an overflow on one rank skips the step on all, and scales stay equal."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

from onebit_triton import OneBitLamb

from ..ranks import RankPool
from ..training import gradients, parameters, set_gradients, two_groups, vector

FREEZE, STEPS, OVERFLOWS = 3, 9, (1, 5)


def scaled_run(
    rank: int, ranks: int, kind: str, dtype: torch.dtype, backend: str, max_grad_norm: float | None
) -> dict[str, Any]:
    """Steps under a scaler, with overflows on the last rank in both stages, and what became of them."""
    params = parameters(dtype)
    optimizer = two_groups(params, freeze_step=FREEZE, backend=backend, max_grad_norm=max_grad_norm)
    make = functools.partial(GradScaler, "cpu") if kind == "GradScaler" else functools.partial(ShardedGradScaler, "cpu")
    scaler = make(init_scale=2.0**10, growth_interval=3)
    scaler.scale(torch.ones(()))
    seen: dict[str, list[Any]] = {"params": [vector(params)], "scale": [scaler.get_scale()]}
    for step in range(STEPS):
        set_gradients(params, [grad * scaler.get_scale() for grad in gradients(step, rank, params)])
        if step in OVERFLOWS and rank == ranks - 1:
            params[3].grad[1] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        seen["params"].append(vector(params))
        seen["scale"].append(scaler.get_scale())
    return seen | optimizer.metrics()


@pytest.mark.parametrize(
    ("kind", "dtype", "backend", "max_grad_norm"),
    [
        ("GradScaler", torch.float16, "torch", 0.1),
        ("GradScaler", torch.float32, "triton", None),
        ("ShardedGradScaler", torch.float16, "torch", None),
    ],
    ids=str,
)
def test_one_overflow_skips_on_all_ranks(
    ranks: RankPool, kind: str, dtype: torch.dtype, backend: str, max_grad_norm: float | None
) -> None:
    results = ranks(3, scaled_run, kind, dtype, backend, max_grad_norm)
    growth = [1, 1, 0.5, 0.5, 0.5, 1, 0.5, 0.5, 0.5, 1]  # halved by an overflow, doubled by three steps without one
    for seen in results:
        assert seen["scale"] == [factor * 2.0**10 for factor in growth]
        assert (seen["stage"], seen["skipped_steps"], seen["step"]) == ("compression", 2, STEPS - 2)
        for step, (before, after) in enumerate(zip(seen["params"], seen["params"][1:], strict=False)):
            assert (before == after).all() == (step in OVERFLOWS)
        np.testing.assert_array_equal(seen["params"][-1], results[0]["params"][-1])


def unlike_scales(rank: int, ranks: int) -> np.ndarray:
    """Every rank scales by another power of two, as ranks do whose scalers cannot learn of each other's overflows."""
    params = parameters()
    optimizer = two_groups(params, freeze_step=FREEZE, backend="torch", max_grad_norm=0.1)
    for step in range(STEPS):
        scale = 1.0 if step < FREEZE else 2.0 ** (rank + 3)
        set_gradients(params, [grad * scale for grad in gradients(step, rank, params)])
        optimizer.grad_scale = torch.tensor(scale)
        optimizer.step()
        del optimizer.grad_scale
    return vector(params)


def unscaled(rank: int, ranks: int) -> np.ndarray:
    params = parameters()
    optimizer = two_groups(params, freeze_step=FREEZE, backend="torch", max_grad_norm=0.1)
    for step in range(STEPS):
        set_gradients(params, gradients(step, rank, params))
        optimizer.step()
    return vector(params)


def test_in_compression_every_rank_may_have_a_scale_of_its_own(ranks: RankPool) -> None:
    scaled, plain = ranks(2, unlike_scales), ranks(2, unscaled)
    for rank in range(2):
        np.testing.assert_array_equal(scaled[rank], plain[0])


def train_half(rank: int, ranks: int, dtype: torch.dtype) -> dict[str, Any]:
    """A model in bf16 or fp16 under DDP; DDP gives every rank the weights of rank 0 behind the optimizer's back."""
    torch.manual_seed(rank)
    net = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3)).to(dtype)
    optimizer = OneBitLamb(net.parameters(), lr=0.02, betas=(0.9, 0.9), freeze_step=6, block_elements=64)
    ddp = optimizer.attach(DistributedDataParallel(net))
    data = torch.Generator().manual_seed(rank)
    losses = []
    scaler = GradScaler("cpu", init_scale=2.0**8, enabled=dtype == torch.float16)
    for _ in range(24):
        inputs = torch.randn(16, 12, generator=data)
        loss = torch.nn.functional.cross_entropy(ddp(inputs.to(dtype)).float(), inputs[:, :3].argmax(1))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    masters = torch.cat([optimizer.state[p]["master"].reshape(-1) for p in net.parameters()])
    return {"masters": masters.numpy(), "params": vector(list(net.parameters())), "losses": losses}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_models_train_alike_on_all_ranks(ranks: RankPool, dtype: torch.dtype) -> None:
    results = ranks(2, train_half, dtype)
    for key in ("masters", "params"):
        np.testing.assert_array_equal(results[0][key], results[1][key])
    losses = np.mean([seen["losses"] for seen in results], 0)
    assert losses[-4:].mean() < 0.9 * losses[5] < 0.9 * losses[:2].mean() * 1.05
