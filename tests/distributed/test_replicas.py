"""Replicas stay identical, warmup equals one process with the mean gradient, and no error is ever lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from onebit_triton import OneBitLamb

from ..ranks import RankPool
from ..training import gradients, parameters, set_gradients, two_groups, vector

BACKENDS = [("torch", 50), ("triton", 8)]


def train(rank: int, ranks: int, backend: str, steps: int, dtype: torch.dtype, options: dict[str, Any]) -> np.ndarray:
    params = parameters(dtype)
    optimizer = two_groups(params, backend=backend, **options)
    seen = []
    for step in range(steps):
        set_gradients(params, gradients(step, rank, params))
        optimizer.step()
        seen.append(vector(params))
    assert optimizer.stage == "compression"
    assert optimizer.metrics()["step"] == steps
    return np.stack(seen)


@pytest.mark.parametrize(("backend", "steps"), BACKENDS)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_replicas_are_bit_identical(ranks: RankPool, n: int, backend: str, steps: int) -> None:
    results = ranks(n, train, backend, steps, torch.float32, {})
    for seen in results[1:]:
        np.testing.assert_array_equal(seen, results[0])
    assert np.isfinite(results[0]).all()
    assert not (results[0][-1] == results[0][-2]).all()


@pytest.mark.parametrize(
    "options", [{"max_grad_norm": 0.1}, {"bias_correction": True}, {"coeff_bias_correction": False}]
)
def test_options_keep_replicas_identical_and_have_an_effect(ranks: RankPool, options: dict[str, Any]) -> None:
    results = ranks(2, train, "torch", 20, torch.float32, options)
    np.testing.assert_array_equal(results[0], results[1])
    assert not (results[0][-1] == ranks(2, train, "torch", 20, torch.float32, {})[0][-1]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("backend", "steps"), [("torch", 20), ("triton", 7)])
def test_half_precision_replicas_are_identical(ranks: RankPool, dtype: torch.dtype, backend: str, steps: int) -> None:
    results = ranks(2, train, backend, steps, dtype, {})
    np.testing.assert_array_equal(results[0], results[1])
    assert np.isfinite(results[0]).all()


def test_more_ranks_than_blocks(ranks: RankPool) -> None:
    results = ranks(5, tiny, 12)
    for seen in results[1:]:
        np.testing.assert_array_equal(seen, results[0])


def tiny(rank: int, ranks: int, steps: int) -> np.ndarray:
    params = parameters(shapes=[(3,), (0,), (2, 2)])
    optimizer = OneBitLamb(params, lr=0.01, freeze_step=4, backend="torch")
    for step in range(steps):
        set_gradients(params, gradients(step, rank, params))
        optimizer.step()
    metrics = optimizer.metrics()
    assert metrics["elements"] == 7
    assert metrics["padded_elements"] == 5 * 1024
    return vector(params)


def test_backends_agree(ranks: RankPool) -> None:
    by_torch = ranks(3, train, "torch", 8, torch.float32, {})[0]
    by_triton = ranks(3, train, "triton", 8, torch.float32, {})[0]
    np.testing.assert_allclose(by_triton, by_torch, rtol=0, atol=2e-6)


@pytest.mark.parametrize("n", [2, 3])
def test_warmup_is_one_process_with_the_mean_gradient(ranks: RankPool, n: int) -> None:
    steps = 12
    results = ranks(n, train_warmup, steps)
    params = parameters()
    optimizer = two_groups(params, freeze_step=1000, backend="torch", bucket_elements=10**6)
    for step in range(steps):
        local = [gradients(step, rank, params) for rank in range(n)]
        set_gradients(params, [torch.stack(each).mean(0) for each in zip(*local, strict=True)])
        optimizer.step()
    for seen in results:
        np.testing.assert_allclose(seen["params"], vector(params), rtol=0, atol=1e-6)
        # Fusing tensors into other buckets changes no layer's trust ratio.
        np.testing.assert_allclose(seen["trust_ratio"], optimizer.metrics()["trust_ratio"], rtol=1e-5)


def train_warmup(rank: int, ranks: int, steps: int) -> dict[str, Any]:
    params = parameters()
    optimizer = two_groups(params, freeze_step=1000, backend="torch", bucket_elements=128)
    for step in range(steps):
        set_gradients(params, gradients(step, rank, params))
        local = [p.grad.clone() for p in params]
        optimizer.step()
        assert all(torch.equal(p.grad, grad) for p, grad in zip(params, local, strict=True)), "gradients were changed"
    return {"params": vector(params), "trust_ratio": optimizer.metrics()["trust_ratio"]}


@pytest.mark.parametrize("n", [2, 3, 4])
def test_errors_telescope(ranks: RankPool, n: int) -> None:
    """What was applied plus what is pending is what should have been applied, step after step."""
    results = ranks(n, record_errors, 15)
    params = parameters()
    betas = [0.7] * 3 + [0.9] * 3
    for step in range(1, 10):
        grads = [gradients(5 + step, rank, params) for rank in range(n)]
        for i, beta in enumerate(betas):
            before = [seen[step - 1][i] for seen in results]
            after = [seen[step][i] for seen in results]
            scaling = before[0]["scaling_coeff"]
            mean_grad = np.mean([grads[rank][i].numpy() for rank in range(n)], axis=0)
            momentum = beta * before[0]["exp_avg"] + (1 - beta) * mean_grad
            wanted = momentum * scaling + pending(before)
            got = after[0]["exp_avg"] * scaling + pending(after)
            np.testing.assert_allclose(got, wanted, rtol=0, atol=2e-6 * np.abs(wanted).max())
            assert np.abs(pending(after)).max() > 0


def pending(states: list[dict[str, np.ndarray]]) -> np.ndarray:
    """Mean of the workers' errors plus the server's, which is spread over the ranks in order."""
    server = np.concatenate([state["server_error"] for state in states])
    worker = np.mean([state["worker_error"] for state in states], axis=0)
    return worker + server.reshape(worker.shape)


def record_errors(rank: int, ranks: int, steps: int) -> list[list[dict[str, np.ndarray]]]:
    params = parameters()
    optimizer = two_groups(params, backend="torch")
    seen = []
    for step in range(steps):
        set_gradients(params, gradients(step, rank, params))
        optimizer.step()
        if step >= 5:
            state = optimizer.state_dict()["state"]
            seen.append([{k: v.numpy() for k, v in state[i].items()} for i in range(len(params))])
    return seen
