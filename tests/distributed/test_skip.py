"""A non-finite gradient anywhere makes every rank skip that step, and leaves nothing changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onebit_triton import OneBitLamb

from ..ranks import RankPool
from ..training import gradients, logged, parameters, set_gradients, two_groups, vector


def snapshot(optimizer: OneBitLamb, params: list[Any]) -> dict[str, np.ndarray]:
    """Everything that a skipped step must leave alone, bit for bit, and the pending errors apart."""
    saved = optimizer.state_dict()["state"]
    seen = {"params": vector(params)}
    for number, state in saved.items():
        seen |= {f"{number} {key}": value.numpy() for key, value in state.items()}
    return seen


def largest(values: np.ndarray) -> float:
    return float(np.abs(values).max(initial=0))


def skip_at(rank: int, ranks: int, backend: str, at: int, bad: float, culprit: int) -> dict[str, Any]:
    with logged() as records:
        params = parameters()
        optimizer = two_groups(params, backend=backend, freeze_step=3)
        differences, stages = {}, []
        for step in range(at + 3):
            grads = gradients(step, rank, params)
            if step == at and rank == culprit:
                grads[3][7] = bad
            set_gradients(params, grads)
            before = snapshot(optimizer, params)
            optimizer.step()
            after = snapshot(optimizer, params)
            stages.append(optimizer.stage)
            if step == at:
                exact = [key for key in before if "error" not in key and not np.array_equal(before[key], after[key])]
                differences = {
                    "changed": exact,
                    "error": max((largest(after[k] - before[k]) for k in before if "error" in k), default=0.0),
                    "scale": max((largest(before[k]) for k in before if "worker" in k), default=1.0),
                }
            elif step == at + 1:
                assert not np.array_equal(before["params"], after["params"]), "training did not go on"
    metrics = optimizer.metrics()
    return differences | {
        "params": vector(params), "skipped": metrics["skipped_steps"], "step": metrics["step"], "log": records,
        "stages": stages,
    }  # fmt: skip


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("at", [1, 3, 5], ids=["warmup", "first compressed step", "compression"])
def test_one_rank_makes_all_skip(ranks: RankPool, backend: str, at: int) -> None:
    results = ranks(3, skip_at, backend, at, float("nan"), 1)
    for rank, seen in enumerate(results):
        assert seen["changed"] == []
        assert seen["error"] <= 1e-6 * seen["scale"]
        assert (seen["skipped"], seen["step"]) == (1, at + 2)
        assert np.isfinite(seen["params"]).all()
        np.testing.assert_array_equal(seen["params"], results[0]["params"])
        told = [line for line in seen["log"] if "skipped the step" in line]
        assert len(told) == (rank == 0)
        if at > 2 and rank == 0:
            assert "rank 1" in told[0]
    # A skipped warmup step is made up for: compression begins after three steps that counted.
    assert results[0]["stages"].index("compression") == (3 if at == 1 else 2)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), 1e30])
def test_infinite_and_overflowing_gradients_are_skipped(ranks: RankPool, bad: float) -> None:
    for at in (1, 5):
        for seen in ranks(2, skip_at, "torch", at, bad, 0):
            assert seen["changed"] == []
            assert seen["skipped"] == 1


@pytest.mark.parametrize("at", [1, 4])
def test_one_process_skips_too(at: int) -> None:
    seen = skip_at(0, 1, "torch", at, float("nan"), 0)
    assert seen["changed"] == []
    assert seen["skipped"] == 1


def stuck(rank: int, ranks: int, at: int) -> tuple[list[str], int]:
    """Errors of the steps from `at` on, in which one rank has NaN in two tensors; and the step of the first."""
    params = parameters()
    named = [(f"layer.{i}", p) for i, p in enumerate(params)]
    optimizer = OneBitLamb(named, lr=0.01, freeze_step=3, max_skipped_steps=3, backend="torch", block_elements=64)
    told, first = [], 0
    for step in range(at + 4):
        grads = gradients(step, rank, params)
        if step >= at and rank == ranks - 1:
            grads[3][7] = grads[5][0] = float("nan")
        set_gradients(params, grads)
        before = vector(params)
        try:
            optimizer.step()
        except RuntimeError as error:
            first = first or step
            told.append(str(error))
            np.testing.assert_array_equal(vector(params), before)
    set_gradients(params, gradients(0, rank, params))
    optimizer.step()
    assert not np.array_equal(vector(params), before), "who goes on all the same can"
    return told, first


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("at", [1, 5], ids=["warmup", "compression"])
def test_too_many_skips_in_a_row_are_an_error_on_all_ranks(ranks: RankPool, n: int, at: int) -> None:
    for rank, (told, first) in enumerate(ranks(n, stuck, at)):
        assert (len(told), first) == (2, at + 2)
        assert told[0].startswith(f"Rank {rank}: 3 steps in a row were skipped")
        own_averages = "those of: none of them" if rank < n - 1 else "those of: parameter layer.3, parameter layer.5."
        assert own_averages in told[0]
        assert ("because of rank 2" in told[0]) == (n > 1)
