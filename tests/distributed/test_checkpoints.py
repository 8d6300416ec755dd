"""What is saved continues bit for bit at the same number of ranks; what would be lost is refused."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from onebit_triton import OneBitLamb
from onebit_triton.kernels.tables import Rate
from onebit_triton.stages.switch import pending_error

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


REWARM_AT, REWARM_STEPS = 12, 4


def resume(rank: int, ranks: int, backend: str, points: list[int], steps: int, options: dict[str, Any]) -> None:
    """One run that saves at several points, and from each a run that has to be where that one is some steps on."""
    params = parameters(shapes=[*SHAPES, (6, 5)])
    optimizer = two_groups(params[:-1], backend=backend, **options)
    optimizer.add_param_group({"params": params[-1:], "exp_avg_mask": torch.tensor([0, 1, 1, 0, 1])})
    saved, wanted = {}, {}
    for step in range(max(points) + steps + 1):
        if step in points:
            saved[step] = through_a_file(optimizer.state_dict()), [p.detach().clone() for p in params]
        if step - steps in points:
            wanted[step - steps] = vector(params), optimizer.metrics()
        run_with_rewarming(params, optimizer, rank, range(step, step + 1))
    for at, (state, values) in saved.items():
        again = [torch.nn.Parameter(value) for value in values]
        resumed = two_groups(again[:-1], backend=backend, **(options | {"lr": 0.5}))
        resumed.add_param_group({"params": again[-1:]})
        resumed.load_state_dict(state)
        assert resumed.stage == ("warmup" if at < 5 or REWARM_AT < at < REWARM_AT + REWARM_STEPS else "compression")
        assert resumed.param_groups[0]["lr"] == state["param_groups"][0]["lr"]
        run_with_rewarming(again, resumed, rank, range(at, at + steps))
        np.testing.assert_array_equal(vector(again), wanted[at][0])
        mine, theirs = resumed.metrics(), wanted[at][1]
        for key in ("step", "stage", "skipped_steps", "trust_ratio", "factor", "scaling", "masked_elements"):
            assert mine[key] == theirs[key], key
        assert mine["masked_elements"] == (12 if mine["stage"] == "compression" else 0)


def run_with_rewarming(params: list[Any], optimizer: OneBitLamb, rank: int, steps: range) -> None:
    for step in steps:
        if step == REWARM_AT:
            optimizer.rewarm(REWARM_STEPS)
        run(params, optimizer, rank, range(step, step + 1))


@pytest.mark.parametrize(("n", "backend"), [(1, "torch"), (3, "torch"), (2, "triton")])
def test_resume_is_bit_identical(ranks: RankPool, n: int, backend: str) -> None:
    """Saved in warmup, at the switch, one step on, in compression, in re-warming, and at the switch after it.

    What goes on goes through all of these again.
    """
    options = {"bias_correction": True, "max_grad_norm": 0.5}
    if backend == "torch":
        ranks(n, resume, backend, [3, 5, 6, 9, 13, 16], 20, options)
    else:  # the interpreter is slow: larger blocks make fewer programs
        ranks(n, resume, backend, [3, 9], 20, options | {"block_elements": 256, "bucket_elements": 2048})


def accumulate(
    ddp: torch.nn.Module, optimizer: OneBitLamb, rank: int, steps: range, save_at: int = -1, consolidated: bool = False
) -> tuple[np.ndarray, bytes]:
    """Steps of two backward passes; where the parameters end, and what was saved between two passes."""
    buffer = io.BytesIO()
    for step in steps:
        optimizer.zero_grad()
        for part in range(2):
            data = torch.Generator().manual_seed(100 * step + 10 * part + rank)
            with ddp.no_sync() if part == 0 else contextlib.nullcontext():
                ddp(torch.randn(8, 12, generator=data)).square().mean().backward()
            if step == save_at and part == 0:
                if consolidated:
                    optimizer.consolidate_errors()
                torch.save({"optimizer": optimizer.state_dict(), "model": ddp.module.state_dict()}, buffer)
        optimizer.step()
    return vector(list(ddp.parameters())), buffer.getvalue()


def save_while_accumulating(rank: int, ranks: int) -> None:
    def fresh() -> tuple[torch.nn.Module, OneBitLamb]:
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Tanh(), torch.nn.Linear(20, 3))
        optimizer = OneBitLamb(net.parameters(), lr=0.01, freeze_step=4, backend="torch", max_grad_norm=0.1)
        return optimizer.attach(torch.nn.parallel.DistributedDataParallel(net)), optimizer

    for at in (2, 7):
        for consolidated in (False, True):
            ends, saved = accumulate(*fresh(), rank, range(12), at, consolidated)
            state = torch.load(io.BytesIO(saved), weights_only=True)
            ddp, optimizer = fresh()
            ddp.module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            assert optimizer.stage == ("warmup" if at < 4 else "compression")
            again, _ = accumulate(ddp, optimizer, rank, range(at, 12))
            np.testing.assert_array_equal(again, ends)


def test_state_saved_between_backward_passes_repeats_the_step(ranks: RankPool) -> None:
    """Gradients are no part of it: what was accumulated is accumulated again."""
    ranks(2, save_while_accumulating)


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


PORTABLE: dict[str, Any] = {"bias_correction": True, "max_grad_norm": 0.5}


def save_portable(rank: int, ranks: int, at: int) -> tuple[bytes, np.ndarray, np.ndarray]:
    """A consolidated state; the mean error that was pending before; and where the same run is four steps later."""
    names = [f"layer.{i}" for i in range(len(SHAPES))]
    params = parameters(torch.bfloat16)
    groups = [{"params": list(zip(names[k:j], params[k:j], strict=True))} for k, j in ((0, 3), (3, None))]
    optimizer = OneBitLamb(groups, lr=0.01, freeze_step=5, backend="torch", block_elements=64, **PORTABLE)
    run(params, optimizer, rank, range(at))
    pending = pending_mean(optimizer)
    optimizer.consolidate_errors()
    optimizer.consolidate_errors()  # once is enough
    buffer = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "params": [p.detach() for p in params]}, buffer)
    run(params, optimizer, rank, range(at, at + 4))
    return buffer.getvalue(), pending, vector(params)


def pending_mean(optimizer: OneBitLamb) -> np.ndarray:
    """Mean error that is pending over all ranks, in the parameters' order, as it would reach the momentum."""
    replica = optimizer._replica
    found = []
    for bucket in replica.buckets:
        error = torch.zeros(bucket.elements)
        if bucket.x is not None:
            error = pending_error(bucket.x, bucket.x_scale) / replica.communicator.ranks
            chunk = error.view(replica.communicator.ranks, -1)[replica.communicator.rank]
            chunk += pending_error(bucket.y, bucket.y_scale)
            torch.distributed.all_reduce(error)
        scaled = error.view(bucket.map.blocks, -1) / bucket.map.rows(bucket.rates, Rate.SCALING)
        views = bucket.views(scaled.view(-1))
        found += [(p, view.reshape(-1)) for p, view in zip(bucket.parameters, views, strict=True)]
    order = {p: i for i, p in enumerate(optimizer._parameters())}
    return torch.cat([view for _, view in sorted(found, key=lambda pair: order[pair[0]])]).numpy().copy()


def load_portable(
    rank: int, ranks: int, saved: bytes, at: int, reordered: bool, options: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, bytes]:
    """Load it; the pending error then, the change of the momentum, where the run is four steps later, and its state."""
    loaded = torch.load(io.BytesIO(saved), weights_only=True)
    params = [torch.nn.Parameter(p) for p in loaded["params"]]
    names = [f"layer.{i}" for i in range(len(params))]
    places = [2, 0, 1, 5, 3, 4] if reordered else range(len(params))
    pairs = [(names[i], params[i]) for i in places]
    groups = [{"params": pairs[:3]}, {"params": pairs[3:]}]
    optimizer = OneBitLamb(groups, lr=0.5, freeze_step=5, backend="torch", **(PORTABLE | options))
    optimizer.load_state_dict(loaded["optimizer"])
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in pairs[:3]]
    pending = pending_mean(optimizer)
    if reordered:
        parts = np.split(pending, np.cumsum([p.numel() for _, p in pairs])[:-1])
        spread = {name: part for (name, _), part in zip(pairs, parts, strict=True)}
        pending = np.concatenate([spread[name] for name in names])
    stored = loaded["optimizer"]["state"]
    moved = [optimizer.state_dict()["state"][k]["exp_avg"] - stored[i]["exp_avg"] for k, i in enumerate(places)]
    in_order = [moved[list(places).index(i)].reshape(-1) for i in range(len(params))]
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    run(params, optimizer, rank, range(at, at + 4))
    return pending, torch.cat(in_order).numpy(), vector(params), buffer.getvalue()


@pytest.mark.parametrize("at", [5, 9], ids=["at the switch", "compression"])
def test_consolidated_state_goes_on_exactly(ranks: RankPool, at: int) -> None:
    saved = ranks(2, save_portable, at)
    assert saved[0][0] == saved[1][0], "the state is the same on every rank"
    results = ranks(2, load_portable, saved[0][0], at, False, {"block_elements": 64})
    for (pending, moved, params, again), (_, before, wanted) in zip(results, saved, strict=True):
        np.testing.assert_allclose(pending, before, rtol=0, atol=1e-7)
        assert not moved.any()
        np.testing.assert_array_equal(params, wanted)
        state, loaded = (torch.load(io.BytesIO(b), weights_only=True) for b in (again, saved[0][0]))
        assert state["param_groups"][0]["onebit_lamb"]["errors"] == "mean"
        for key, entry in state["state"].items():
            assert all(torch.equal(value, loaded["optimizer"]["state"][key][name]) for name, value in entry.items())


@pytest.mark.parametrize(("savers", "loaders"), [(4, 2), (2, 3), (4, 1), (1, 4)])
def test_pending_errors_survive_another_number_of_ranks(ranks: RankPool, savers: int, loaders: int) -> None:
    """Also other blocks and buckets, and parameters in another order; on one rank the momentum takes the error."""
    at = 9
    saved = ranks(savers, save_portable, at)
    before, norm = saved[0][1], np.linalg.norm(saved[0][1])
    assert (norm > 0) == (savers > 1)
    options = {"block_elements": 128, "bucket_elements": 512}
    results = ranks(loaders, load_portable, saved[0][0], at, True, options)
    for pending, moved, params, _ in results:
        if loaders == 1:
            np.testing.assert_allclose(moved, before / 0.9, rtol=0, atol=2e-6 * max(norm, 1e-3))
        else:
            assert not moved.any()
            np.testing.assert_allclose(pending, before, rtol=0, atol=1e-6 * max(norm, 1e-3))
        np.testing.assert_array_equal(params, results[0][2])


def refuse_another_order(rank: int, ranks: int) -> None:
    params = parameters()
    optimizer = OneBitLamb([(f"layer.{i}", p) for i, p in enumerate(params)], freeze_step=2, backend="torch")
    run(params, optimizer, rank, range(4))
    state = optimizer.state_dict()
    other = OneBitLamb([(f"layer.{i}", params[i]) for i in (1, 0, 2, 3, 4, 5)], freeze_step=2, backend="torch")
    with pytest.raises(ValueError, match=r"another order.*consolidate_errors"):
        other.load_state_dict(state)
    renamed = OneBitLamb([(f"layer.{i + 1}", p) for i, p in enumerate(params)], freeze_step=2, backend="torch")
    with pytest.raises(ValueError, match=r"only one of two has 'layer\.0'"):
        renamed.load_state_dict(state)


def test_another_order_or_other_names_are_refused(ranks: RankPool) -> None:
    ranks(2, refuse_another_order)


def through_dcp(rank: int, ranks: int, folder: str, at: int) -> None:
    """torch's distributed checkpoints: synchronous and asynchronous, into an optimizer that is new."""

    def fresh() -> tuple[torch.nn.Module, OneBitLamb]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.Tanh(), torch.nn.Linear(24, 3)).bfloat16()
        optimizer = OneBitLamb(model.named_parameters(), lr=0.01, freeze_step=5, backend="torch", block_elements=64)
        return model, optimizer

    def train(model: torch.nn.Module, optimizer: OneBitLamb, steps: range) -> None:
        run(list(model.parameters()), optimizer, rank, steps)

    model, optimizer = fresh()
    train(model, optimizer, range(at))
    optimizer.consolidate_errors()
    saved = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=f"{folder}/now")
    # It talks in the background: over the group of the training its messages would meet ours.
    later = dcp.async_save(saved, checkpoint_id=f"{folder}/later", process_group=torch.distributed.new_group())
    train(model, optimizer, range(at, at + 4))
    later.result()
    for name in ("now", "later"):
        other, resumed = fresh()
        resumed.consolidate_errors()  # the keys of a state in compression, while it is in warmup
        state = {"model": get_model_state_dict(other), "optimizer": get_optimizer_state_dict(other, resumed)}
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        set_model_state_dict(other, state["model"])
        set_optimizer_state_dict(other, resumed, state["optimizer"])
        assert resumed.stage == ("compression" if at >= 5 else "warmup")
        train(other, resumed, range(at, at + 4))
        np.testing.assert_array_equal(vector(list(other.parameters())), vector(list(model.parameters())))


@pytest.mark.parametrize("at", [3, 8], ids=["warmup", "compression"])
def test_distributed_checkpoints(ranks: RankPool, tmp_path: Path, at: int) -> None:
    ranks(2, through_dcp, str(tmp_path), at)
