"""A state that is not what was saved is refused with a reason, on all ranks, or it is good enough to train with."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from onebit_triton import OneBitLamb
from onebit_triton.checkpoint import KEY
from onebit_triton.deepspeed import load_deepspeed_state

from ..ranks import RankPool
from ..training import gradients, parameters, set_gradients, vector
from .mutations import VALUES, Mutation, mutate, mutations

EXAMPLES = settings.default.max_examples
SHAPES = [(5, 3), (3, 5), (1,), (0,), (70,)]
STAGES = {"warmup": 2, "the last warmup step": 3, "compression": 5}
"""Steps before a state is saved; two make the warmup last three."""


def build(ranks: int = 1, **options: Any) -> tuple[list[torch.nn.Parameter], OneBitLamb]:
    params = parameters(shapes=SHAPES)
    mask = torch.tensor([1.0, 0.0, 1.0])
    groups = [
        {"params": [("a", params[0])], "exp_avg_mask": mask}, {"params": list(zip("bcde", params[1:], strict=True))},
    ]  # fmt: skip
    options = {"freeze_step": 4, "block_elements": 64, "bucket_elements": 128, "backend": "torch"} | options
    return params, OneBitLamb(groups, lr=0.01, max_grad_norm=0.5, **options)


def train(params: list[torch.nn.Parameter], optimizer: OneBitLamb, rank: int, steps: range) -> None:
    for step in steps:
        set_gradients(params, gradients(step, rank, params))
        optimizer.step()


def bits(params: list[torch.nn.Parameter], optimizer: OneBitLamb) -> bytes:
    """Everything there is, to the last bit."""
    buffer = io.BytesIO()
    torch.save([optimizer.state_dict(), [p.detach() for p in params], optimizer.stage], buffer)
    return buffer.getvalue()


def try_to_load(optimizer: OneBitLamb, params: list[torch.nn.Parameter], state: Any, load: Any, rank: int) -> str:
    """The reason why a state was refused, "" if it was not.

    Raises:
        AssertionError: if it was refused without one, or not left alone then.
    """
    before, shown = bits(params, optimizer), {p: dict(entry) for p, entry in optimizer.state.items()}
    try:
        load(optimizer, state)
    except (ValueError, RuntimeError) as error:
        reason = str(error)
        assert reason.startswith(("Invalid ", "Rank", "Ranks do not agree")), reason
        assert len(reason) > 20
        assert bits(params, optimizer) == before, reason
        now = {p: dict(entry) for p, entry in optimizer.state.items()}
        assert all(now[p][key] is value for p, entry in shown.items() for key, value in entry.items())
        return reason
    # What was loaded can be trained with, looked at, and saved again.
    train(params, optimizer, rank, range(3))
    optimizer.metrics()
    assert optimizer.state_dict()["state"].keys() == {0, 1, 2, 4}
    return ""


@pytest.fixture(scope="module")
def saved() -> dict[str, Any]:
    states = {}
    for name, steps in STAGES.items():
        params, optimizer = build()
        train(params, optimizer, 0, range(steps))
        states[name] = optimizer.state_dict()
    return states


def load(optimizer: OneBitLamb, state: Any) -> None:
    optimizer.load_state_dict(state)


@settings(max_examples=EXAMPLES)
@given(st.sampled_from(sorted(STAGES)), st.integers(0, 5), mutations())
def test_states(saved: dict[str, Any], stage: str, at: int, changes: list[Mutation]) -> None:
    params, optimizer = build()
    train(params, optimizer, 0, range(at))
    try_to_load(optimizer, params, mutate(saved[stage], changes), load, 0)


@pytest.mark.parametrize("stage", STAGES)
def test_what_is_whole_is_loaded(saved: dict[str, Any], stage: str) -> None:
    params, optimizer = build()
    assert try_to_load(optimizer, params, saved[stage], load, 0) == ""


@pytest.mark.parametrize("state", VALUES, ids=lambda value: repr(value)[:40])
def test_what_is_no_state_is_refused(state: Any) -> None:
    params, optimizer = build()
    assert try_to_load(optimizer, params, state, load, 0)


PROGRESS = {
    "version": (4, "1", True, 1.0, None), "stage": ("", "Warmup", None, []), "errors": ("all", 1),
    "calls": (-1, 0.5, "5", True, 2**31, 2**70, None, 2), "counted": (-1, 6, 3.0), "skipped": (-1, 6, None),
    "streak": (-1, 1), "warmup_base": (-1, 6, 2), "warmup_steps": (0, -1, 10**6), "check_at": (-1, None),
    "ranks": (0, -1, "1"), "rank": (-1, 1), "layout": (None, "x"), "rho": (-1.0, float("nan"), float("inf"), None),
    "rho_weight": (-1.0, float("nan"), "1"),
    "looks": ("", (), 1, [1], [[]], [[1, 2.0]], [[1.0, 2.0, 3.0]], [[-1, 2.0, 3.0]], [[1, float("nan"), 3.0]], []),
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in PROGRESS.items() for value in values])
def test_progress_is_checked(saved: dict[str, Any], key: str, value: Any) -> None:
    """Each entry alone, in a state of compression; the message names it."""
    params, optimizer = build()
    state = mutate(saved["compression"], [])
    for group in state["param_groups"]:
        group[KEY][key] = value
    reason = try_to_load(optimizer, params, state, load, 0)
    named = (key, "counted") if key in ("calls", "warmup_base", "warmup_steps") else (key, "version")
    assert reason.startswith(tuple(f"Invalid state_dict: {name} " for name in named))


@pytest.mark.parametrize(("key", "value"), [("check_at", 10**6), ("errors", "own"), ("counted", 10**6)])
def test_progress_is_checked_in_warmup(saved: dict[str, Any], key: str, value: Any) -> None:
    """A call that never comes would make the warmup last for ever."""
    params, optimizer = build()
    state = mutate(saved["warmup"], [])
    for group in state["param_groups"]:
        group[KEY][key] = value
    assert key in try_to_load(optimizer, params, state, load, 0)


def test_groups_must_tell_the_same(saved: dict[str, Any]) -> None:
    for change in ({KEY: None}, {KEY: {}}, {"param_names": ["b", "c", "d"]}, {"param_names": ["b", "c", "d", 5]}):
        params, optimizer = build()
        state = mutate(saved["compression"], [])
        state["param_groups"][1] |= change
        assert next(iter(change)) in try_to_load(optimizer, params, state, load, 0)


@settings(max_examples=EXAMPLES)
@given(st.data())
def test_files(saved: dict[str, Any], data: st.DataObject) -> None:
    """Bytes of a file are not what they were: torch does not read it, or what it reads is refused or good enough."""
    buffer = io.BytesIO()
    torch.save(saved[data.draw(st.sampled_from(sorted(STAGES)))], buffer)
    content = bytearray(buffer.getvalue())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    try:
        state = torch.load(io.BytesIO(content), weights_only=True)
    except Exception:
        return  # torch's own to say
    params, optimizer = build()
    try_to_load(optimizer, params, state, load, 0)


# On several ranks

SAVED_BY: dict[int, dict[str, Any]] = {}


def states_of(rank: int, ranks: int) -> dict[str, Any]:
    """States of this rank in every stage, made once."""
    if ranks not in SAVED_BY:
        states = {}
        for name, steps in STAGES.items():
            params, optimizer = build()
            train(params, optimizer, rank, range(steps))
            states[name] = optimizer.state_dict()
        optimizer.consolidate_errors()
        SAVED_BY[ranks] = states | {"consolidated": optimizer.state_dict()}
    return SAVED_BY[ranks]


Case = tuple[str, int, int, list[Mutation]]


def load_on_ranks(rank: int, ranks: int, cases: list[Case]) -> list[str]:
    """Why each case was refused on this rank, "" if it was loaded."""
    reasons = []
    for stage, at, whose, changes in cases:
        params, optimizer = build()
        train(params, optimizer, rank, range(at))
        state = states_of(rank, ranks)[stage]
        if whose in (rank, ranks):
            state = mutate(state, changes)
        reasons.append(try_to_load(optimizer, params, state, load, rank))
        train(params, optimizer, rank, range(20, 25))
        optimizer.check_replicas()
    return reasons


@settings(max_examples=max(1, EXAMPLES // 20))
@given(
    st.lists(
        st.tuples(
            st.sampled_from([*sorted(STAGES), "consolidated"]), st.integers(0, 5), st.integers(0, 2), mutations()
        ),
        min_size=1, max_size=8,
    )
)  # fmt: skip
@example([("compression", 3, 1, [Mutation("drop", 1)])])
@example([("warmup", 0, 0, [Mutation("swap", 30, 31)])])
def test_states_on_ranks(ranks: RankPool, cases: list[Case]) -> None:
    """One rank's state is spoiled, or that of both: both load, and stay one, or both refuse, and go on."""
    for first, second in zip(*ranks(2, load_on_ranks, cases), strict=True):
        assert bool(first) == bool(second), (first, second)


def change_on_rank(rank: int, ranks: int, what: str) -> str:
    """Load a state that is good by itself, but on rank 1 not the same."""
    params, optimizer = build()
    train(params, optimizer, rank, range(2))
    state = mutate(states_of(rank, ranks)["compression"], [])
    if rank == 1:
        for group in state["param_groups"]:
            if what == "the saved hyperparameters":
                group["lr"] *= 2
            elif what == "the saved counts":
                group[KEY]["check_at"] += 1
        if what == "the saved moments":
            state["state"][4]["exp_avg"].view(-1)[-1] += 1e-6
    return try_to_load(optimizer, params, state, load, rank)


@pytest.mark.parametrize("what", ["the saved hyperparameters", "the saved counts", "the saved moments"])
def test_ranks_must_load_the_same(ranks: RankPool, what: str) -> None:
    for reason in ranks(2, change_on_rank, what):
        assert f"Ranks do not agree on {what}: rank 1" in reason


@pytest.mark.parametrize("stage", ["warmup", "compression"])
def test_any_changed_bit_of_a_tensor_is_found(stage: str) -> None:
    """A state of version 2 does not know of warmups that end by themselves, one of version 1 has no hash; both load."""
    params, optimizer = build()
    train(params, optimizer, 0, range(2))
    state = copy.deepcopy(states_of(0, 1)[stage])
    good = bits(params, optimizer)
    for entry in state["state"].values():
        for key, tensor in entry.items():
            tensor.view(-1).view(torch.int32)[-1:] ^= 1
            with pytest.raises(ValueError, match="not those that were saved"):
                optimizer.load_state_dict(state)
            assert bits(params, optimizer) == good, key
            tensor.view(-1).view(torch.int32)[-1:] ^= 1
    for version, unknown in ((2, "looks"), (1, "tensors")):
        for group in state["param_groups"]:
            del group[KEY][unknown]
            group[KEY]["version"] = version
        optimizer.load_state_dict(state)
        assert optimizer.stage == stage


# DeepSpeed's states


@pytest.fixture(scope="module")
def deepspeed() -> dict[str, Any]:
    """States as DeepSpeed's OnebitLamb saves them, in warmup and in compression."""
    states = {}
    for name, steps in (("warmup", 2), ("compression", 6)):
        params, optimizer = build()
        train(params, optimizer, 0, range(steps))
        ours = optimizer.state_dict()
        entries: dict[int, dict[str, Any]] = {}
        for number, entry in enumerate(ours["state"].values()):
            entries[number] = {
                "step": steps + 1, "lamb_coeff_freeze": float(entry["lamb_coeff"]),
                "last_factor": float(entry["last_factor"]), "exp_avg": entry["exp_avg"],
                "exp_avg_sq": entry["exp_avg_sq"], "exp_avg_sq_fresh": entry["exp_avg_sq"].clone(),
            }  # fmt: skip
            if name == "compression":
                entries[number]["scaling_coeff"] = 1.0
        groups = [
            {
                "params": numbers, "lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.01,
                "max_coeff": 10.0, "min_coeff": 0.01, "bias_correction": True,
            }
            for numbers in ([0], [1, 2, 3])
        ]  # fmt: skip
        states[name] = {"state": entries, "param_groups": groups}
        flat = [
            [entry["exp_avg"].clone() for entry in list(entries.values())[part]] for part in (slice(1), slice(1, 4))
        ]
        states[f"{name}, in half precision"] = {"optimizer_state_dict": states[name], "fp32_groups": flat}
    return states


def test_deepspeed_states_that_are_whole_are_loaded(deepspeed: dict[str, Any]) -> None:
    for state in deepspeed.values():
        params, optimizer = build()
        assert try_to_load(optimizer, params, state, load_deepspeed_state, 0) == ""


@settings(max_examples=EXAMPLES)
@given(st.integers(0, 3), st.integers(0, 5), mutations())
def test_deepspeed_states(deepspeed: dict[str, Any], which: int, at: int, changes: list[Mutation]) -> None:
    params, optimizer = build()
    train(params, optimizer, 0, range(at))
    state = mutate(list(deepspeed.values())[which], changes)
    try_to_load(optimizer, params, state, load_deepspeed_state, 0)


@pytest.mark.parametrize("state", VALUES, ids=lambda value: repr(value)[:40])
def test_what_is_no_state_of_deepspeed_is_refused(state: Any) -> None:
    params, optimizer = build()
    before = vector(params)
    assert try_to_load(optimizer, params, state, load_deepspeed_state, 0)
    np.testing.assert_array_equal(vector(params), before)
