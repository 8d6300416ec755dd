"""Ranks that do not agree are told so at construction, each naming the rank; nothing hangs. Groups stay apart."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from onebit_triton import OneBitLamb

from ..ranks import RankPool
from ..training import gradients, parameters, set_gradients, two_groups, vector


def construct(rank: int, ranks: int, odd: dict[str, Any]) -> str:
    """Construct with an odd option or list of shapes on rank 1; what was raised."""
    mine = odd if rank == 1 else {}
    shapes = mine.get("shapes", [(10, 10), (7,)])
    options = {key: value for key, value in mine.items() if key != "shapes"}
    try:
        OneBitLamb(parameters(shapes=shapes), backend="torch", **options)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "constructed"


@pytest.mark.parametrize(
    ("odd", "told"),
    [
        ({"shapes": [(10, 10)]}, "the number of parameter tensors: rank 1 has 1, rank 0 has 2"),
        ({"shapes": [(10, 10), (8,)]}, "the number of parameter elements: rank 1 has 108, rank 0 has 107"),
        ({"shapes": [(7,), (10, 10)]}, "the layout"),
        ({"shapes": [(20, 5), (7,)]}, "the parameters' shapes and dtypes"),
        ({"block_elements": 64}, "the layout"),
        ({"freeze_step": 7}, "freeze_step: rank 1 has 7, rank 0 has 2000"),
        ({"freeze_step": "auto", "max_freeze_step": 9}, 'whether freeze_step is "auto": rank 1 has 1, rank 0 has 0'),
        ({"bias_correction": True}, "the options"),
        ({"gradient_dtype": torch.bfloat16}, "the options"),
        ({"max_grad_norm": 1.0}, "the options"),
        ({"max_skipped_steps": 5, "maximize": True}, "the options"),
    ],
)
def test_ranks_that_differ_are_named(ranks: RankPool, odd: dict[str, Any], told: str) -> None:
    for message in ranks(3, construct, odd):
        assert message.startswith("RuntimeError: Ranks do not agree on")
        assert told in message


def test_a_rank_that_fails_does_not_leave_the_others_waiting(ranks: RankPool) -> None:
    first, second, third = ranks(3, construct, {"lr": -1.0})
    assert second == "ValueError: Invalid lr=-1.0 in param group 0. Must be a finite number >= 0.0."
    for message in (first, third):
        assert message.startswith("RuntimeError: Rank 1 failed to construct the optimizer")


def add_unlike_groups(rank: int, ranks: int) -> None:
    params = parameters()
    optimizer = two_groups(params, backend="torch")
    unlike = {"params": [torch.nn.Parameter(torch.ones(3 + rank))]}
    with pytest.raises(RuntimeError, match="the number of parameter elements: rank 1 has"):
        optimizer.add_param_group(unlike)
    assert len(optimizer.param_groups) == 2
    set_gradients(params, gradients(0, rank, params))
    optimizer.step()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    optimizer.step()
    assert len(optimizer.state_dict()["state"]) == len(params) + 1


def test_groups_that_differ_are_refused(ranks: RankPool) -> None:
    ranks(2, add_unlike_groups)


def add_bad_group_on_one_rank(rank: int, ranks: int) -> None:
    params = parameters()
    optimizer = two_groups(params, backend="torch")
    kind, told = (ValueError, "Invalid lr=-1 in param group 2") if rank == 1 else (RuntimeError, "Rank 1 failed to add")
    with pytest.raises(kind, match=told):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], "lr": -1 if rank == 1 else 0.1})
    assert len(optimizer.param_groups) == 2
    optimizer.step()


def test_a_group_that_one_rank_refuses_is_refused_by_all(ranks: RankPool) -> None:
    ranks(2, add_bad_group_on_one_rank)


def trained_over(group: Any, rank: int) -> np.ndarray:
    """Parameters after steps of both stages over a process group."""
    params = parameters()
    optimizer = two_groups(params, backend="torch", process_group=group)
    for step in range(10):
        set_gradients(params, gradients(step, rank, params))
        optimizer.step()
    return vector(params)


def two_worlds(rank: int, ranks: int) -> np.ndarray:
    """Two groups train at once; then a sub-group trains while the other ranks do something else."""
    groups = [torch.distributed.new_group(members) for members in ([0, 2], [1, 3])]
    group = groups[rank % 2]
    return trained_over(group, rank)


def test_disjoint_groups_do_not_meet(ranks: RankPool) -> None:
    a, b, c, d = ranks(4, two_worlds)
    np.testing.assert_array_equal(a, c)
    np.testing.assert_array_equal(b, d)
    assert not (a == b).all()


def mesh_worlds(rank: int, ranks: int) -> np.ndarray:
    """Two pipeline stages of two replicas each: every stage trains in its dimension of a mesh, with its own model."""
    mesh = torch.distributed.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "replicate"))
    with pytest.raises(ValueError, match=r"A mesh must have one dimension: .*mesh\['replicate'\]"):
        OneBitLamb(parameters(), process_group=mesh, backend="torch")
    return trained_over(mesh["replicate"], rank)


def test_a_dimension_of_a_mesh_is_a_group(ranks: RankPool) -> None:
    a, b, c, d = ranks(4, mesh_worlds)
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(c, d)
    assert not (a == c).all()


def sub_group(rank: int, ranks: int) -> tuple[np.ndarray, str] | None:
    """Ranks 1 and 2 of three train, and copy the optimizer; pickling it is refused, since its group is."""
    group = torch.distributed.new_group([1, 2])
    if rank == 0:
        return None
    params = parameters()
    optimizer = two_groups(params, backend="torch", process_group=group, freeze_step=3)
    for step in range(5):
        set_gradients(params, gradients(step, rank, params))
        optimizer.step()
    twin, copies = copy.deepcopy((optimizer, params))
    for step in range(5, 8):
        for trained, o in ((params, optimizer), (copies, twin)):
            set_gradients(trained, gradients(step, rank, trained))
            o.step()
    np.testing.assert_array_equal(vector(params), vector(copies))
    with pytest.raises(TypeError, match=r"process_group of its own cannot be pickled.*state_dict"):
        pickle.dumps(optimizer)
    return vector(params)


def test_a_sub_group_trains_alone_and_is_shared_by_copies(ranks: RankPool) -> None:
    nobody, first, second = ranks(3, sub_group)
    assert nobody is None
    np.testing.assert_array_equal(first, second)


def outside(rank: int, ranks: int) -> str:
    group = torch.distributed.new_group([0, 1])
    if rank < 2:
        OneBitLamb(parameters(), process_group=group, backend="torch")
        return "constructed"
    with pytest.raises(ValueError, match="Must be a process group that rank 2 belongs to"):
        OneBitLamb(parameters(), process_group=group, backend="torch")
    return "refused"


def test_a_group_without_this_rank_is_refused(ranks: RankPool) -> None:
    assert ranks(3, outside) == ["constructed", "constructed", "refused"]


def rewarm(rank: int, ranks: int) -> dict[str, Any]:
    params = parameters()
    optimizer = two_groups(params, backend="torch", freeze_step=4)
    with pytest.raises(RuntimeError, match="still warming up"):
        optimizer.rewarm(3)
    stages, pending = [], 0.0
    for step in range(16):
        set_gradients(params, gradients(step, rank, params))
        if step == 8:
            with pytest.raises(ValueError, match="Invalid steps=0"):
                optimizer.rewarm(0)
            before = [{k: v.double() for k, v in s.items()} for s in optimizer.state_dict()["state"].values()]
            optimizer.rewarm(3)
            after = [{k: v.double() for k, v in s.items()} for s in optimizer.state_dict()["state"].values()]
            pending = [(b, a) for b, a in zip(before, after, strict=True)]
        stages.append(optimizer.stage)
        optimizer.step()
    metrics = optimizer.metrics()
    return {
        "params": vector(params), "stages": stages, "step": metrics["step"],
        "pending": [({k: v.numpy() for k, v in b.items()}, {k: v.numpy() for k, v in a.items()}) for b, a in pending],
    }  # fmt: skip


def test_rewarm_folds_the_errors_into_the_momentum(ranks: RankPool) -> None:
    results = ranks(3, rewarm)
    for seen in results:
        np.testing.assert_array_equal(seen["params"], results[0]["params"])
        assert seen["stages"] == ["warmup"] * 4 + ["compression"] * 4 + ["warmup"] * 3 + ["compression"] * 5
        assert seen["step"] == 16
    for i, beta in enumerate([0.7] * 3 + [0.9] * 3):
        states = [seen["pending"][i] for seen in results]
        server = np.concatenate([before["server_error"] for before, _ in states])
        worker = np.mean([before["worker_error"] for before, _ in states], axis=0)
        error = worker + server.reshape(worker.shape)
        before, after = states[0]
        wanted = before["exp_avg"] + error / before["scaling_coeff"] / beta
        np.testing.assert_allclose(after["exp_avg"], wanted, rtol=1e-5, atol=1e-8)
        assert np.abs(error).max() > 0
        for key in ("exp_avg_sq", "lamb_coeff", "step"):
            np.testing.assert_array_equal(before[key], after[key])
