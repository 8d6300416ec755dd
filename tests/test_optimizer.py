"""OneBitLamb as a torch.optim.Optimizer, on one process."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from onebit_triton import OneBitLamb

from .training import gradients, parameters, set_gradients, two_groups, vector


def run(params: list[Any], optimizer: OneBitLamb, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        set_gradients(params, gradients(step, 0, params))
        optimizer.step()


def test_switches_after_freeze_step_steps(caplog: pytest.LogCaptureFixture) -> None:
    params = parameters()
    optimizer = OneBitLamb(params, freeze_step=3, backend="torch")
    stages = []
    with caplog.at_level(logging.INFO, "onebit_triton"):
        for step in range(5):
            stages.append(optimizer.stage)
            run(params, optimizer, 1, step)
    assert stages == ["warmup"] * 3 + ["compression"] * 2
    assert [r.getMessage() for r in caplog.records] == [
        "step 3: warmup ends, compression begins; bytes sent per step and rank: 0 before, 0 after"
    ]


def test_every_step_counts() -> None:
    params = parameters()
    optimizer = OneBitLamb(params, backend="torch")
    before = vector(params)
    run(params, optimizer, 1)
    assert not (vector(params) == before).all()
    assert optimizer.metrics()["step"] == 1


def test_first_warmup_step_is_lamb() -> None:
    """The formulas, written out in double precision."""
    params = parameters(shapes=[(50, 3)])
    p, g = params[0].detach().double().clone(), gradients(0, 0, params)[0].double()
    optimizer = OneBitLamb(params, lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.03, backend="torch")
    run(params, optimizer, 1)
    update = 0.2 * g / ((0.1 * g * g).sqrt() + 1e-6) + 0.03 * p
    ratio = float(p.norm() / update.norm())
    np.testing.assert_allclose(vector(params), (p - 0.1 * ratio * update).flatten(), rtol=1e-5, atol=1e-7)
    assert optimizer.metrics()["trust_ratio"] == pytest.approx([ratio], rel=1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_closure(backend: str) -> None:
    params = parameters(shapes=[(5,)])
    optimizer = OneBitLamb(params, lr=0.01, backend=backend, block_elements=64)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = params[0].square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(4)]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_schedulers_in_both_stages(backend: str) -> None:
    """A schedule equals setting lr by hand, and moves the parameters accordingly."""
    by_schedule, by_hand = parameters(shapes=[(9,)]), parameters(shapes=[(9,)])
    options: dict[str, Any] = {"freeze_step": 3, "backend": backend, "block_elements": 64}
    scheduled = OneBitLamb(by_schedule, lr=0.1, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(scheduled, 0.5)
    manual = OneBitLamb(by_hand, lr=torch.tensor(0.1), **options)
    for step in range(6):
        run(by_schedule, scheduled, 1, step)
        run(by_hand, manual, 1, step)
        np.testing.assert_array_equal(vector(by_schedule), vector(by_hand))
        scheduler.step()
        manual.param_groups[0]["lr"].mul_(0.5)
    still = vector(by_hand)
    manual.param_groups[0]["lr"].zero_()
    run(by_hand, manual, 1, 6)
    np.testing.assert_array_equal(vector(by_hand), still)


OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.02}, {"betas": (0.5, 0.999)}, {"betas": (0.9, 0.9)}, {"eps": 1e-3}, {"weight_decay": 0.5},
    {"bias_correction": True}, {"max_coeff": 0.02}, {"min_coeff": 5.0}, {"coeff_beta": 0.1},
    {"coeff_bias_correction": False}, {"factor_max": 0.6}, {"factor_min": 1.5}, {"factor_threshold": 0.001},
    {"max_grad_norm": 1e-9}, {"freeze_step": 4},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=[str(option) for option in OPTIONS])
def test_every_option_changes_the_result(options: dict[str, Any]) -> None:
    def train(**chosen: Any) -> np.ndarray:
        params = parameters()
        optimizer = OneBitLamb(params, **({"lr": 0.01, "freeze_step": 6, "backend": "torch"} | chosen))
        for step in range(12):
            # Gradients that grow after the switch, so that the fresh variance and its bounds matter.
            set_gradients(params, [g * (1 + max(0, step - 5)) for g in gradients(step, 0, params)])
            optimizer.step()
        return vector(params)

    assert not np.allclose(train(**options), train(), rtol=0, atol=1e-7)


def test_backends_agree_with_masks_missing_and_skips() -> None:
    def train(backend: str) -> np.ndarray:
        params = parameters()
        optimizer = two_groups(params, backend=backend, bias_correction=True, max_grad_norm=0.4)
        seen = []
        for step in range(9):
            grads = gradients(step, 0, params)
            grads[0][5:9] = 0
            if step in (2, 7):
                grads[4][0, 0] = math.inf
            set_gradients(params, grads)
            if step in (1, 6):
                params[5].grad = None
            optimizer.step()
            seen.append(vector(params))
        assert optimizer.metrics()["skipped_steps"] == 2
        return np.stack(seen)

    np.testing.assert_allclose(train("triton"), train("torch"), rtol=0, atol=2e-6)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_group_added_in_warmup(backend: str) -> None:
    """State of the first group goes on; the result is that of groups that were there from the start."""
    params = parameters()
    optimizer = OneBitLamb(params[:3], lr=0.01, freeze_step=5, backend=backend, block_elements=64)
    run(params[:3], optimizer, 2)
    before = optimizer.state_dict()["state"]
    optimizer.add_param_group({"params": params[3:], "lr": 0.02})
    after = optimizer.state_dict()["state"]
    for i in range(3):
        assert all(torch.equal(before[i][key], after[i][key]) for key in before[i])
    assert after[5]["step"] == 0
    run(params, optimizer, 4, 2)
    assert optimizer.stage == "compression"
    with pytest.raises(RuntimeError, match="refused in the compression stage"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})
    assert len(optimizer.param_groups) == 2
    run(params, optimizer, 1, 6)


def test_channels_last_and_transposed_parameters() -> None:
    """Memory order does not matter, not even when a gradient has another one."""
    plain = parameters(shapes=[(4, 3, 2, 5), (6, 7)])
    odd = [
        torch.nn.Parameter(plain[0].detach().clone().to(memory_format=torch.channels_last)),
        torch.nn.Parameter(plain[1].detach().clone().t().contiguous().t()),
    ]
    for params in (plain, odd):
        run(params, OneBitLamb(params, lr=0.01, freeze_step=3, backend="torch"), 6)
    for a, b in zip(plain, odd, strict=True):
        np.testing.assert_allclose(a.detach(), b.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("at", [2, 6])
def test_state_dict_has_torchs_form(at: int) -> None:
    params = parameters()
    optimizer = two_groups(params, backend="torch")
    run(params, optimizer, at)
    state = optimizer.state_dict()
    assert set(state) == {"state", "param_groups"}
    assert list(state["state"]) == list(range(len(params)))
    keys = {"exp_avg", "exp_avg_sq"} | ({"exp_avg_sq_fresh"} if at > 5 else set())
    for number, param in enumerate(params):
        entry = state["state"][number]
        assert int(entry["step"]) == at
        assert {key for key, value in entry.items() if value.dim()} <= keys
        for key in keys:
            assert entry[key].shape == param.shape
            assert entry[key].dtype == torch.float32
            assert entry[key].untyped_storage().nbytes() == 4 * param.numel()
    assert set(optimizer.state) == set(params)


def test_half_precision_state_survives_a_load() -> None:
    params = parameters(torch.bfloat16)
    optimizer = OneBitLamb(params, lr=0.01, backend="torch")
    run(params, optimizer, 3)
    state = optimizer.state_dict()
    other = OneBitLamb(parameters(torch.bfloat16), backend="torch")
    other.load_state_dict(state)
    for number, entry in other.state_dict()["state"].items():
        assert all(torch.equal(value, state["state"][number][key]) for key, value in entry.items())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda s: s["state"].pop(1), "the state of parameter 1 of group 0 must have a tensor 'exp_avg'"),
        (
            lambda s: s["state"][2].pop("exp_avg_sq"),
            "the state of parameter 2 of group 0 must have a tensor 'exp_avg_sq'",
        ),
        (lambda s: s["state"][0].update(exp_avg=torch.ones(3)), "'exp_avg' of parameter 0 of group 0 must have shape"),
        (lambda s: s["param_groups"].pop(), "must have as many groups and parameters"),
        (lambda s: s["param_groups"][0].pop("onebit_lamb"), "is it a state of OneBitLamb?"),
        (lambda s: s["param_groups"][0]["onebit_lamb"].update(version=99), "version 99; this release reads 1 to 3"),
        (
            lambda s: s["param_groups"][0]["onebit_lamb"].update(stage="cooling"),
            "stage must be one of warmup, compression, got",
        ),
        (lambda s: s["param_groups"][0]["onebit_lamb"].pop("calls"), "must have exactly the entries"),
        (lambda s: s.pop("state"), "must have torch's form"),
        (lambda s: s["param_groups"][0].pop("lr"), "must have torch's form"),
    ],
)
def test_spoilt_state_is_refused_whole(spoil: Any, message: str) -> None:
    params = parameters()
    optimizer = two_groups(params, backend="torch")
    run(params, optimizer, 2)
    state = optimizer.state_dict()
    spoil(state)
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace("?", r"\?")):
        optimizer.load_state_dict(state)
    after = optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for number, entry in before["state"].items():
        assert all(torch.equal(value, after["state"][number][key]) for key, value in entry.items())


class NoHostReads(TorchDispatchMode):
    """Turns everything that would make the host wait for a device into an error."""

    READS = ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero", "aten::equal")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._schema.name not in self.READS, f"the host reads a tensor: {func}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("stage", ["warmup", "compression"])
def test_steady_steps_read_nothing_on_the_host(ranks: Any, stage: str, dtype: torch.dtype) -> None:
    for n in (1, 2):
        ranks(n, step_without_host_reads, stage, dtype)


def step_without_host_reads(rank: int, n: int, stage: str, dtype: torch.dtype) -> None:
    """fp16 under a scaler, which then reads nothing either."""
    params = parameters(dtype)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=dtype == torch.float16)
    scaler.scale(torch.ones(()))
    freeze_step = 2 if stage == "compression" else 100
    optimizer = two_groups(params, backend="torch", freeze_step=freeze_step, max_grad_norm=0.1, bias_correction=True)
    for step in range(6):
        set_gradients(params, gradients(step, rank, params))
        if step < 4:
            scaler.step(optimizer)
            scaler.update()
            continue
        optimizer.param_groups[0]["lr"] *= 0.5
        with NoHostReads():
            scaler.step(optimizer)
        scaler.update()
    assert optimizer.stage == stage
    with pytest.raises(AssertionError, match="the host reads"), NoHostReads():
        float(params[0].sum())


def test_gradients_are_let_go() -> None:
    import gc
    import weakref

    params = parameters()
    optimizer = OneBitLamb(params, backend="torch")
    run(params, optimizer, 1)
    grads = [weakref.ref(p.grad) for p in params]
    optimizer.zero_grad()
    gc.collect()
    assert not any(grad() is not None for grad in grads)


@pytest.mark.parametrize(
    "replacement", [torch.zeros(3, 4), torch.zeros(12, dtype=torch.bfloat16).view(4, 3), torch.zeros(3, 4).t()]
)
def test_parameter_replaced_by_another_form_is_refused(replacement: torch.Tensor) -> None:
    """Kernels go by addresses, so a change that they would not see must not pass."""
    params = parameters(shapes=[(4, 3)])
    optimizer = OneBitLamb(params, backend="torch")
    params[0].data = replacement
    with pytest.raises(RuntimeError, match="Invalid parameter 0 of group 0: shape, strides, dtype and device"):
        optimizer.step()


def test_parameter_moved_in_memory_goes_on() -> None:
    params = parameters()
    optimizer = OneBitLamb(params, lr=0.01, freeze_step=2, backend="torch")
    for step in range(4):
        params[0].data = params[0].detach().clone()
        before = vector(params)
        run(params, optimizer, 1, step)
        assert not np.isclose(before, vector(params), rtol=0, atol=0).any()


def test_empty_parameters_train_along() -> None:
    params = [torch.nn.Parameter(torch.empty(0, 4)), *parameters(), torch.nn.Parameter(torch.empty(0))]
    optimizer = OneBitLamb(params, freeze_step=2, backend="torch")
    run(params, optimizer, 5)
    other = OneBitLamb(params, freeze_step=2, backend="torch")
    other.load_state_dict(optimizer.state_dict())
    only_empty = [torch.nn.Parameter(torch.empty(0))]
    run(only_empty, OneBitLamb(only_empty, freeze_step=2, backend="torch"), 4)


def test_metrics_are_plain() -> None:
    params = parameters()
    optimizer = two_groups(params, backend="torch")
    for at in range(7):
        run(params, optimizer, 1, at)
        for key, value in optimizer.metrics().items():
            assert isinstance(value, (str, int, float, dict, list)), key
    metrics = optimizer.metrics()
    assert metrics["steps_to_switch"] == 0
    assert len(metrics["layers"]) == len(metrics["trust_ratio"]) == len(metrics["factor"]) == len(params)
