"""Every key of a DeepSpeed configuration becomes an argument, a sentence, or an error that names it."""

from __future__ import annotations

import inspect
import json
import logging
from typing import Any

import pytest
import torch

from onebit_triton import OneBitLamb
from onebit_triton.checkpoint import KEY
from onebit_triton.deepspeed import arguments_from_deepspeed, load_deepspeed_state

CARRIED = {
    "lr": 4e-3, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 0.02, "max_coeff": 0.3, "min_coeff": 0.02,
    "coeff_beta": 0.7, "factor_max": 3.0, "factor_min": 0.6, "factor_threshold": 0.2,
}  # fmt: skip
IGNORED = {
    "bias_correction": True, "eps_inside_sqrt": True, "max_grad_norm": 1.0, "amsgrad": False, "cuda_aware": True,
    "comm_backend_name": "mpi",
}  # fmt: skip
ALWAYS = ("freeze_step", "coeff_bias_correction")


def block(**params: Any) -> dict[str, Any]:
    return {"type": "OneBitLamb", "params": params}


def about(notes: list[str], key: str) -> str:
    """The one note that begins with a key."""
    (note,) = [note for note in notes if note.startswith((f"{key}=", f"{key} "))]
    return note


def convert(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """As a user does: from JSON, into an optimizer."""
    arguments, notes = arguments_from_deepspeed(json.loads(json.dumps(config)))
    OneBitLamb([torch.nn.Parameter(torch.ones(3))], **arguments)
    return arguments, notes


def test_what_carries_over() -> None:
    arguments, notes = convert(block(freeze_step=1000, **CARRIED))
    assert arguments == CARRIED | {
        "betas": (0.8, 0.99), "freeze_step": 999, "bias_correction": False, "coeff_bias_correction": False,
        "max_grad_norm": None,
    }  # fmt: skip
    assert [note.partition("=")[0] for note in notes] == list(ALWAYS)
    assert "freeze_step=1000 becomes 999" in notes[0]


def test_absent_parameters_have_the_defaults_of_deepspeed() -> None:
    for empty in ({"type": "onebitlamb"}, block(), {"type": "ONEBITLAMB", "params": None}):
        arguments, _ = convert(empty)
        assert arguments == {
            "lr": 1e-3, "freeze_step": 99_999, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0,
            "max_coeff": 10.0, "min_coeff": 0.01, "coeff_beta": 0.9, "factor_max": 4.0, "factor_min": 0.5,
            "factor_threshold": 0.1, "bias_correction": False, "coeff_bias_correction": False, "max_grad_norm": None,
        }  # fmt: skip


@pytest.mark.parametrize(("given", "steps"), [(1, 1), (2, 1), (3, 2)])
def test_warmup_loses_the_swallowed_call(given: int, steps: int) -> None:
    assert convert(block(freeze_step=given))[0]["freeze_step"] == steps


@pytest.mark.parametrize("key", IGNORED)
def test_what_had_no_effect_has_none_and_is_named(key: str) -> None:
    plain, _ = convert(block())
    arguments, notes = convert(block(**{key: IGNORED[key]}))
    assert arguments == plain
    assert "is dropped" in about(notes, key)


def test_whole_configuration() -> None:
    arguments, notes = convert(
        {
            "train_batch_size": 64, "wall_clock_breakdown": True, "gradient_clipping": 0.5,
            "gradient_accumulation_steps": 4, "fp16": {"enabled": True, "loss_scale": 0}, "bf16": {"enabled": False},
            "zero_optimization": {"stage": 1}, "scheduler": {"type": "WarmupLR"},
            "optimizer": block(lr=0.1) | {"legacy_fusion": False},
        }
    )  # fmt: skip
    assert (arguments["lr"], arguments["max_grad_norm"]) == (0.1, 0.5)
    assert "max_grad_norm" in about(notes, "gradient_clipping")
    assert "autocast" in about(notes, "fp16")
    assert "DistributedDataParallel" in about(notes, "zero_optimization")
    assert "no_sync" in about(notes, "gradient_accumulation_steps")
    assert "lr_scheduler" in about(notes, "scheduler")
    assert "dropped" in about(notes, "legacy_fusion")
    assert notes[-1].endswith("train_batch_size, wall_clock_breakdown.")
    assert not any(note.startswith("bf16") for note in notes)


def test_what_is_off_needs_no_word() -> None:
    off = {"fp16": {"enabled": False}, "zero_optimization": {"stage": 0}, "gradient_accumulation_steps": 1}
    arguments, notes = convert(off | {"scheduler": None, "gradient_clipping": 0.0, "optimizer": block()})
    assert arguments["max_grad_norm"] is None
    assert [note.partition("=")[0] for note in notes] == list(ALWAYS)


def test_absent_clipping_is_the_default_of_deepspeed() -> None:
    arguments, notes = convert({"optimizer": block()})
    assert arguments["max_grad_norm"] == 1.0
    assert any(note.startswith("gradient_clipping is absent") for note in notes)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"type": "OneBitAdam", "params": {}}, "Invalid type='OneBitAdam'"),
        ({"optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}, "Invalid type='Adam'"),
        ({"fp16": {"enabled": True}}, "'optimizer' block"),
        ({"optimizer": None}, "'optimizer' block"),
        ([("type", "OneBitLamb")], "'optimizer' block"),
        ({"type": "OneBitLamb", "param": {}}, "Invalid 'param' in the optimizer block"),
        ({"type": "OneBitLamb", "params": [1]}, r"Invalid params=\[1\]"),
        (block(learning_rate=1e-3), "Invalid learning_rate=0.001"),
        (block(lr="auto"), "Invalid lr='auto' in the optimizer's params"),
        (block(betas=[0.9]), r"Invalid betas=\[0.9\]"),
        (block(eps=0), "Invalid eps=0"),
        (block(weight_decay=None), "Invalid weight_decay=None"),
        (block(freeze_step=0), "Invalid freeze_step=0"),
        (block(freeze_step=1e3), "Invalid freeze_step=1000.0"),
        (block(min_coeff=20), "Invalid min_coeff=20"),
        (block(amsgrad=True), "Invalid amsgrad=True"),
        ({"optimizer": block(), "gradient_clipping": "auto"}, "Invalid gradient_clipping='auto'"),
        ({"optimizer": block(), "gradient_clipping": -1.0}, "Invalid gradient_clipping=-1.0"),
    ],
)
def test_errors_name_the_key(config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arguments_from_deepspeed(config)


def test_notes_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "onebit_triton"):
        _, notes = arguments_from_deepspeed(block(cuda_aware=True))
    (record,) = caplog.records
    assert all(note in record.getMessage() for note in notes)


def test_every_parameter_of_onebitlamb_is_covered() -> None:
    lamb = pytest.importorskip("deepspeed.runtime.fp16.onebit.lamb")
    theirs = inspect.signature(lamb.OnebitLamb.__init__).parameters
    assert set(theirs) == {"self", "params", "deepspeed", "freeze_step", *CARRIED, *IGNORED}
    arguments, _ = convert(block())
    for key in CARRIED:
        assert arguments[key] == theirs[key].default, key
    assert arguments["freeze_step"] == theirs["freeze_step"].default - 1


# Loading: what needs no trajectory. Trajectories are in distributed/test_deepspeed.py.

SHAPES = [(5, 3), (0,), (7,)]


def saved_state(step: int, compression: bool) -> dict[str, Any]:
    """A state in DeepSpeed's form, over the parameters that are not empty."""
    generator = torch.Generator().manual_seed(3)
    state = {}
    for number, shape in enumerate([s for s in SHAPES if s != (0,)]):
        state[number] = {
            "step": step, "lamb_coeff_freeze": 0.3 + number, "last_factor": 1.1 if compression else 1.0,
            "exp_avg": torch.randn(shape, generator=generator), "exp_avg_sq": torch.rand(shape, generator=generator),
            "exp_avg_sq_fresh": torch.rand(shape, generator=generator),
        }  # fmt: skip
        if compression:
            state[number]["scaling_coeff"] = 0.5 + number
    group = {
        "lr": 0.02, "bias_correction": True, "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.03,
        "max_grad_norm": 0.0, "max_coeff": 5.0, "min_coeff": 0.1, "initial_lr": 0.04, "params": [0, 1],
        "exp_avg_mask": torch.zeros(1),
    }  # fmt: skip
    return {"state": state, "param_groups": [group]}


def fresh(dtype: torch.dtype = torch.float32, **options: Any) -> OneBitLamb:
    params = [torch.nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in SHAPES]
    return OneBitLamb(params, **({"freeze_step": 9, "coeff_beta": 0.7, "backend": "torch"} | options))


@pytest.mark.parametrize("compression", [False, True])
def test_loaded_entries(compression: bool) -> None:
    steps = 12 if compression else 4
    theirs = saved_state(steps + 1, compression)
    theirs["state"][1]["exp_avg_sq"][2] = 0.0
    mask = torch.tensor(1)
    optimizer = fresh()
    optimizer.param_groups[0]["exp_avg_mask"] = mask
    load_deepspeed_state(optimizer, theirs)

    assert optimizer.stage == ("compression" if compression else "warmup")
    assert optimizer.metrics()["step"] == steps
    assert optimizer.metrics()["steps_to_switch"] == (0 if compression else 5)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["initial_lr"], group["weight_decay"], group["coeff_beta"]) == (0.02, 0.04, 0.03, 0.7)
    assert torch.equal(group["exp_avg_mask"], mask)
    ours = optimizer.state_dict()
    assert ours["state"].keys() == {0, 2}
    for mine, saved in zip((0, 2), (0, 1), strict=True):
        entry, original = ours["state"][mine], theirs["state"][saved]
        torch.testing.assert_close(entry["exp_avg_sq"], original["exp_avg_sq"], rtol=0, atol=0)
        moving = original["exp_avg_sq"] > 0
        assert torch.equal(entry["exp_avg"], original["exp_avg"] * moving)
        warm = min(steps, 9)
        expected = {
            "step": steps, "lamb_coeff": 0.3 + saved, "lamb_coeff_correction": 1 - 0.7**warm,
            "bias_correction1": 1 - 0.8**warm, "bias_correction2": 1 - 0.95**warm,
            "last_factor": original["last_factor"], "scaling_coeff": original.get("scaling_coeff", 1.0),
        }  # fmt: skip
        for key, value in expected.items():
            assert entry[key].item() == pytest.approx(value, rel=1e-6), key
        if compression:
            assert torch.equal(entry["exp_avg_sq_fresh"], original["exp_avg_sq_fresh"])


@pytest.mark.parametrize("steps", [9, 15])
def test_warmup_that_is_over_ends_when_loaded(steps: int) -> None:
    theirs = saved_state(steps + 1, False)
    optimizer = fresh()
    load_deepspeed_state(optimizer, {"cur_scale": 1.0, "optimizer_state_dict": theirs, "fp32_groups": []})
    assert optimizer.stage == "compression"
    ours = optimizer.state_dict()["state"]
    rms = [entry["exp_avg"].square().mean().sqrt().item() for entry in theirs["state"].values()]
    for mine, saved in zip((0, 2), (0, 1), strict=True):
        # v' starts as v, whatever was saved: DeepSpeed sets it only in the very step that freeze_step names.
        assert torch.equal(ours[mine]["exp_avg_sq_fresh"], theirs["state"][saved]["exp_avg_sq"])
        assert ours[mine]["scaling_coeff"].item() == pytest.approx(sum(rms) / 2 / rms[saved], rel=1e-6)


def test_copies_of_half_precision_parameters_become_masters() -> None:
    optimizer = fresh(dtype=torch.bfloat16)
    params = optimizer.param_groups[0]["params"]
    copies = [p.detach().float() + 2.0**-20 for p in params if p.numel()]
    load_deepspeed_state(optimizer, {"optimizer_state_dict": saved_state(5, False), "fp32_groups": [copies]})
    found = optimizer.state_dict()["state"]
    for number, copy in zip((0, 2), copies, strict=True):
        assert torch.equal(found[number]["master"], copy)
    wrapped = {"optimizer_state_dict": saved_state(5, False), "fp32_groups": [[torch.zeros(1), torch.zeros(1)]]}
    with pytest.raises(ValueError, match="'master' of parameter 0 of group 0 must have shape"):
        load_deepspeed_state(optimizer, wrapped)


def test_a_loaded_state_is_not_shared_with_the_file() -> None:
    theirs = saved_state(5, False)
    before = theirs["state"][0]["exp_avg"].clone()
    optimizer = fresh()
    load_deepspeed_state(optimizer, theirs)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert torch.equal(theirs["state"][0]["exp_avg"], before)
    assert KEY not in theirs["param_groups"][0]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: state.pop("param_groups"), "entry 'optimizer' of its checkpoint file"),
        (lambda state: state["param_groups"][0]["params"].pop(), r"groups of \[2\] parameters .* got \[1\]"),
        (lambda state: state["state"].pop(1), "parameter 2 of group 0 must have"),
        (lambda state: state["state"][0].pop("exp_avg_sq_fresh"), r"group 0 must have \['exp_avg_sq_fresh'\]"),
        (lambda state: state["state"][1].pop("scaling_coeff"), r"must have \['scaling_coeff'\]"),
        (lambda state: state["state"][1].update(exp_avg_sq_fresh=torch.ones(6)), r"must have shape \(7,\), got \(6,\)"),
        (lambda state: state["param_groups"][0].update(lr="auto"), "Invalid lr='auto' in param group 0"),
        (lambda state: state["state"][0].update(step=9) or state["state"][1].update(step=9), "freeze_step=9"),
    ],
)  # fmt: skip
def test_states_that_do_not_fit_change_nothing(spoil: Any, message: str) -> None:
    state = saved_state(13, True)
    spoil(state)
    optimizer = fresh(lr=0.5)
    with pytest.raises(ValueError, match=message):
        load_deepspeed_state(optimizer, state)
    assert optimizer.stage == "warmup"
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.metrics()["step"] == 0


def test_our_own_state_is_not_deepspeeds() -> None:
    with pytest.raises(ValueError, match=r"must have \['exp_avg_sq_fresh', 'lamb_coeff_freeze'\]"):
        load_deepspeed_state(fresh(), fresh().state_dict() | {"param_groups": [{"params": [0, 2]}]})
