"""What is saved continues bit for bit at the same number of ranks; what would be lost is refused."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch

from onebit_triton import OneBitLamb

from ..ranks import RankPool
from ..training import SHAPES, gradients, parameters, set_gradients, two_groups, vector


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


def run(params: list[Any], optimizer: OneBitLamb, rank: int, steps: range) -> None:
    for step in steps:
        set_gradients(params, gradients(step, rank, params))
        optimizer.step()


def resume(rank: int, ranks: int, backend: str, at: int, steps: int, options: dict[str, Any]) -> None:
    params = parameters(shapes=[*SHAPES, (6, 5)])
    optimizer = two_groups(params[:-1], backend=backend, **options)
    mask = torch.tensor([0, 1, 1, 0, 1])
    optimizer.add_param_group({"params": params[-1:], "exp_avg_mask": mask})
    run(params, optimizer, rank, range(at))
    state = through_a_file(optimizer.state_dict())
    values = [p.detach().clone() for p in params]
    run(params, optimizer, rank, range(at, at + steps))

    again = [torch.nn.Parameter(value) for value in values]
    resumed = two_groups(again[:-1], backend=backend, **(options | {"lr": 0.5}))
    resumed.add_param_group({"params": again[-1:]})
    resumed.load_state_dict(state)
    assert resumed.stage == ("compression" if at >= 5 else "warmup")
    assert resumed.param_groups[0]["lr"] == state["param_groups"][0]["lr"]
    run(again, resumed, rank, range(at, at + steps))
    np.testing.assert_array_equal(vector(again), vector(params))
    mine, theirs = resumed.metrics(), optimizer.metrics()
    for key in ("step", "stage", "skipped_steps", "trust_ratio", "factor", "scaling", "masked_elements"):
        assert mine[key] == theirs[key], key
    assert mine["masked_elements"] == 12


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("at", [3, 5, 6, 9], ids=["warmup", "at the switch", "one step on", "compression"])
def test_resume_is_bit_identical(ranks: RankPool, n: int, at: int) -> None:
    ranks(n, resume, "torch", at, 20, {"bias_correction": True, "max_grad_norm": 0.5})


@pytest.mark.parametrize("at", [3, 7])
def test_resume_is_bit_identical_with_kernels(ranks: RankPool, at: int) -> None:
    ranks(2, resume, "triton", at, 4, {})


def save(rank: int, ranks: int, at: int) -> bytes:
    params = parameters()
    optimizer = two_groups(params, backend="torch")
    run(params, optimizer, rank, range(at))
    buffer = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "params": [p.detach() for p in params]}, buffer)
    return buffer.getvalue()


def load_at_another_number(rank: int, ranks: int, saved: bytes, at: int) -> np.ndarray:
    loaded = torch.load(io.BytesIO(saved), weights_only=True)
    params = [torch.nn.Parameter(p) for p in loaded["params"]]
    optimizer = two_groups(params, backend="torch", bucket_elements=256)
    optimizer.load_state_dict(loaded["optimizer"])
    run(params, optimizer, rank, range(at, 12))
    assert optimizer.stage == "compression"
    return vector(params)


@pytest.mark.parametrize(("savers", "at"), [(2, 3), (1, 8)], ids=["warmup", "compression on one rank"])
def test_state_without_errors_loads_at_any_number_of_ranks(ranks: RankPool, savers: int, at: int) -> None:
    saved = ranks(savers, save, at)
    for n in (1, 3):
        results = ranks(n, load_at_another_number, saved[0], at)
        for seen in results:
            np.testing.assert_array_equal(seen, results[0])


def refused(rank: int, ranks: int, saved: list[bytes], options: dict[str, Any]) -> str:
    params = parameters()
    optimizer = two_groups(params, backend="torch", **options)
    before = vector(params)
    state = torch.load(io.BytesIO(saved[rank % len(saved)]), weights_only=True)["optimizer"]
    try:
        optimizer.load_state_dict(state)
    except (ValueError, RuntimeError) as error:
        # Nothing half-done: the optimizer trains on.
        run(params, optimizer, rank, range(7))
        assert not (vector(params) == before).all()
        return str(error)
    return "loaded"


def test_pending_errors_are_not_dropped(ranks: RankPool) -> None:
    saved = ranks(2, save, 8)
    for n in (1, 3):
        for message in ranks(n, refused, saved, {}):
            assert f"saved in compression by 2 ranks, loaded by {n}" in message
    first, second = ranks(2, refused, saved[:1], {})
    assert "saved in compression by rank 0, loaded by rank 1" in second
    assert "Rank 1 failed to load its state_dict" in first
    for message in ranks(2, refused, saved, {"block_elements": 128}):
        assert "another layout" in message
    assert ranks(2, refused, saved, {}) == ["loaded", "loaded"]


def test_states_of_different_moments_are_refused(ranks: RankPool) -> None:
    early, late = ranks(2, save, 3)[0], ranks(2, save, 4)[1]
    for message in ranks(2, refused, [early, late], {}):
        assert "do not agree on the saved step: rank 1 has 4, rank 0 has 3" in message
