"""A run that DeepSpeed began goes on as DeepSpeed would have continued it: recorded runs, and the real OnebitLamb."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onebit_triton import OneBitLamb
from onebit_triton.deepspeed import arguments_from_deepspeed, load_deepspeed_state

from ..ranks import RankPool
from ..training import gradients, parameters, set_gradients, vector

DATA = Path(__file__).parents[1] / "data"
TOLERANCE = 2e-6

CARRIED = (
    "lr", "eps", "weight_decay", "max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold"
)  # fmt: skip


def config_of(run: Any) -> dict[str, Any]:
    """The optimizer block of a recorded run. DeepSpeed's freeze_step counted the call that it swallowed."""
    params = {key: float(run[key]) for key in CARRIED}
    return {
        "type": "OneBitLamb",
        "params": params | {"betas": run["betas"].tolist(), "freeze_step": int(run["freeze_step"]) + 1},
    }


def state_of(run: Any, steps: int) -> dict[str, Any]:
    """State in DeepSpeed's form after some real steps of a recorded run."""
    sizes, warmup, beta = run["sizes"].tolist(), int(run["freeze_step"]), float(run["coeff_beta"])
    coeff = np.zeros(len(sizes))
    for used in run["lamb_coeff"][: min(steps, warmup)]:
        coeff = np.where(used != 1.0, beta * coeff + (1 - beta) * used, coeff)
    if steps >= warmup:
        np.testing.assert_allclose(coeff, run["lamb_coeff_freeze"], rtol=1e-6)
    tensors = {
        key: torch.from_numpy(run[key][steps - 1]).split(sizes) for key in ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")
    }
    state: dict[int, dict[str, Any]] = {}
    for number in range(len(sizes)):
        state[number] = {
            "step": steps + 1, "lamb_coeff_freeze": float(coeff[number]),
            "last_factor": float(run["last_factor"][steps - 1][number]) if steps > warmup else 1.0,
            **{key: pieces[number].clone() for key, pieces in tensors.items()},
        }  # fmt: skip
        if steps > warmup:
            state[number]["scaling_coeff"] = float(run["scaling_coeff"][number])
    group = {key: float(run[key]) for key in ("lr", "eps", "weight_decay", "max_coeff", "min_coeff")}
    group |= {"betas": tuple(run["betas"].tolist()), "bias_correction": True, "max_grad_norm": 0.0}
    return {"state": state, "param_groups": [group | {"params": list(range(len(sizes)))}]}


def give_errors(optimizer: OneBitLamb, run: Any, steps: int, rank: int) -> None:
    """Put the recorded errors, which DeepSpeed does not save, where loading left zeros."""
    state = optimizer.state_dict()
    sizes = run["sizes"].tolist()
    worker = torch.from_numpy(run["worker_error"][rank, steps - 1]).split(sizes)
    server, start = torch.from_numpy(run["server_error"][rank, steps - 1]), 0
    for number, entry in state["state"].items():
        assert not entry["worker_error"].any()
        assert not entry["server_error"].any()
        entry["worker_error"] = worker[number]
        end = start + entry["server_error"].numel()
        entry["server_error"], start = server[start:end], end
    assert start == server.numel()
    for group in state["param_groups"]:
        group["onebit_lamb"]["tensors"] = 0  # changed on purpose
    optimizer.load_state_dict(state)


def continue_recorded(rank: int, ranks: int, path: str, steps: int) -> list[Any]:
    run = np.load(path)
    params = [
        torch.nn.Parameter(p.clone()) for p in torch.from_numpy(run["param"][steps - 1]).split(run["sizes"].tolist())
    ]
    arguments, _ = arguments_from_deepspeed(config_of(run))
    optimizer = OneBitLamb(params, **arguments, block_elements=64, backend="torch")
    load_deepspeed_state(optimizer, state_of(run, steps))
    stages = [optimizer.stage]
    if ranks > 1 and steps > arguments["freeze_step"]:
        give_errors(optimizer, run, steps, rank)
    seen = []
    for grads in run["grad"][steps:, rank]:
        set_gradients(params, list(torch.from_numpy(grads).split(run["sizes"].tolist())))
        optimizer.step()
        stages.append(optimizer.stage)
        seen.append(vector(params))
    metrics = optimizer.metrics()
    return [np.stack(seen), stages, metrics["step"], metrics["trust_ratio"]]


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *((name, steps) for name in ("even_w1", "even_w2", "even_w4") for steps in (1, 6, 10, 11, 17)),
        *(("even_w4_nowd", steps) for steps in (4, 8, 13)),
    ],
)
def test_recorded_run_goes_on(ranks: RankPool, name: str, steps: int) -> None:
    path = DATA / f"{name}.npz"
    run = np.load(path)
    warmup = int(run["freeze_step"])
    for seen, stages, counted, ratios in ranks(run["grad"].shape[1], continue_recorded, str(path), steps):
        assert np.abs(seen - run["param"][steps:]).max() < TOLERANCE
        assert counted == len(run["param"])
        np.testing.assert_allclose(ratios, run["lamb_coeff"][-1], rtol=1e-4)
        # The stage is that of the next step.
        assert [stage == "compression" for stage in stages] == [k >= warmup for k in range(steps, counted + 1)]


def load_and_train(rank: int, ranks: int, path: str, steps: int, broken: int) -> np.ndarray | str:
    run = np.load(path)
    sizes = run["sizes"].tolist()
    params = [torch.nn.Parameter(p.clone()) for p in torch.from_numpy(run["param"][steps - 1]).split(sizes)]
    optimizer = OneBitLamb(params, freeze_step=int(run["freeze_step"]), backend="torch")
    state = state_of(run, steps)
    if rank == broken:
        del state["state"]
    try:
        load_deepspeed_state(optimizer, state)
    except (ValueError, RuntimeError) as error:
        return str(error)
    for step in range(8):
        set_gradients(params, gradients(step, rank, params))
        optimizer.step()
    assert optimizer.stage == "compression"
    return vector(params)


@pytest.mark.parametrize("steps", [6, 10, 17])
def test_loads_at_any_number_of_ranks(ranks: RankPool, steps: int) -> None:
    first, *others = ranks(3, load_and_train, str(DATA / "even_w2.npz"), steps, -1)
    assert np.isfinite(first).all()
    for other in others:
        np.testing.assert_array_equal(other, first)


def test_is_loaded_on_all_ranks_or_on_none(ranks: RankPool) -> None:
    first, second = ranks(2, load_and_train, str(DATA / "even_w2.npz"), 6, 1)
    assert "Rank 1 failed to load its DeepSpeed state" in first
    assert "must be that of DeepSpeed's optimizer" in second


SHAPES = [(64, 3), (128,), (2, 4, 32), (64,)]
"""Nothing is padded at two ranks, here or there, so that chunks and scales are the same."""

PARAMS = {"lr": 0.02, "freeze_step": 8, "betas": [0.9, 0.99], "weight_decay": 0.01, "max_coeff": 5.0, "coeff_beta": 0.8}


def take_over(deepspeed: Any, theirs: list[Any]) -> tuple[list[Any], OneBitLamb]:
    """Copies of DeepSpeed's parameters, and an optimizer that has loaded its state from a file."""
    buffer = io.BytesIO()
    torch.save(deepspeed.state_dict(), buffer)
    buffer.seek(0)
    mine = [torch.nn.Parameter(p.detach().clone()) for p in theirs]
    arguments, _ = arguments_from_deepspeed({"type": "OneBitLamb", "params": PARAMS})
    optimizer = OneBitLamb(mine, **(arguments | {"lr": 9.0}), block_elements=64, backend="torch")
    load_deepspeed_state(optimizer, torch.load(buffer, weights_only=True))
    return mine, optimizer


def beside_the_real_one(rank: int, ranks: int) -> list[tuple[str, float]]:
    """Take over from the real OnebitLamb at several moments, and take the same steps as it from there."""
    from benchmarks.rivals import deepspeed_onebit_lamb

    theirs = parameters(shapes=SHAPES)
    deepspeed = deepspeed_onebit_lamb(theirs, "compression", **PARAMS)
    engine = deepspeed.deepspeed
    seen = []
    for step in range(24):
        if step in (0, 3, 7, 12):
            mine, optimizer = take_over(deepspeed, theirs)
            for error in deepspeed.worker_errors + deepspeed.server_errors:
                error.zero_()  # DeepSpeed's own loading does that too
        assert (optimizer.stage == "warmup") == engine.enable_backward_allreduce
        grads = gradients(step, rank, theirs)
        set_gradients(mine, grads)
        if engine.enable_backward_allreduce:
            for grad in grads:  # DeepSpeed's engine does that
                torch.distributed.all_reduce(grad)
                grad /= ranks
        set_gradients(theirs, grads)
        deepspeed.step()
        optimizer.step()
        seen.append((optimizer.stage, float(np.abs(vector(mine) - vector(theirs)).max())))
    return seen


def test_takes_over_from_the_real_onebitlamb(ranks: RankPool) -> None:
    pytest.importorskip("deepspeed")
    for seen in ranks(2, beside_the_real_one):
        # Its freeze_step of 8 were 7 steps of warmup.
        assert [stage for stage, _ in seen] == ["warmup"] * 6 + ["compression"] * 18
        assert max(distance for _, distance in seen) < TOLERANCE, seen
