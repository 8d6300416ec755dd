"""What torch's own optimizer tests, and the loops that people have, demand of any optimizer, in both stages."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

from onebit_triton import OneBitLamb

from .training import gradients, parameters, set_gradients, two_groups, vector

FREEZE, STEPS = 3, 7

LAMBDA = [lambda step: 0.9**step, lambda step: 0.8**step]

SCHEDULERS: dict[str, Callable[[OneBitLamb], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, LAMBDA),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, [lambda _: 0.9, lambda _: 0.7]),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 4], 0.5),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, FREEZE - 1),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.25, total_iters=5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6, 2.0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.001, 0.02, step_size_up=3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.02, total_steps=STEPS + 1),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.002, anneal_epochs=4),
}


def take(optimizer: OneBitLamb, params: list[Any], step: int) -> None:
    set_gradients(params, gradients(step, 0, params))
    optimizer.step()


def new(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[OneBitLamb, list[Any]]:
    params = parameters(dtype)
    return two_groups(params, freeze_step=FREEZE, backend="torch", **options), params


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_means_what_it_writes(name: str) -> None:
    """A run under a scheduler is the run in which its rates, and momenta, are written by hand."""
    optimizer, params = new()
    scheduler = SCHEDULERS[name](optimizer)
    by_hand, other = new()
    seen = []
    for step in range(STEPS):
        for group, source in zip(by_hand.param_groups, optimizer.param_groups, strict=True):
            group["lr"], group["betas"] = source["lr"], source["betas"]
        seen.append([(group["lr"], group["betas"]) for group in optimizer.param_groups])
        take(optimizer, params, step)
        take(by_hand, other, step)
        np.testing.assert_array_equal(vector(params), vector(other))
        scheduler.step(*[1.0] * (name == "ReduceLROnPlateau"))
    assert optimizer.stage == "compression"
    assert len(set(map(str, seen[:FREEZE]))) > 1, "it moved before the switch"
    assert len(set(map(str, seen[FREEZE:]))) > 1 or name == "ConstantLR", "and after it"


def test_all_schedulers_are_there() -> None:
    base = lr_scheduler.LRScheduler
    found = {name for name, kind in vars(lr_scheduler).items() if isinstance(kind, type) and issubclass(kind, base)}
    assert found - {"LRScheduler", "_LRScheduler"} == set(SCHEDULERS) - {"SWALR"}


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda both: pickle.loads(pickle.dumps(both)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("at", [0, 2, FREEZE, 5])
def test_a_copy_goes_on_like_the_original(how: str, at: int, dtype: torch.dtype) -> None:
    optimizer, params = new(dtype, max_grad_norm=0.5, bias_correction=True, maximize=True)
    for step in range(at):
        take(optimizer, params, step)
    before = vector(params)
    twin, copied = COPIES[how]((optimizer, params))
    assert twin.param_groups[0]["params"][0] is copied[0]
    assert (twin.stage, twin.defaults) == (optimizer.stage, optimizer.defaults)
    for step in range(at, at + 4):
        take(twin, copied, step)
    np.testing.assert_array_equal(vector(params), before)
    for step in range(at, at + 4):
        take(optimizer, params, step)
    np.testing.assert_array_equal(vector(params), vector(copied))


def test_a_copy_keeps_names_and_rates() -> None:
    params = parameters()
    optimizer = OneBitLamb([(f"layer.{i}", p) for i, p in enumerate(params)], lr=torch.tensor(0.01))
    optimizer.param_groups[0]["lr"].mul_(0.5)
    twin = copy.deepcopy(optimizer)
    assert twin.param_groups[0]["param_names"] == [f"layer.{i}" for i in range(len(params))]
    assert twin.param_groups[0]["lr"] is not optimizer.param_groups[0]["lr"]
    assert float(twin.param_groups[0]["lr"]) == pytest.approx(0.005)


@pytest.mark.parametrize("at", [1, 5])
def test_step_and_state_hooks(at: int) -> None:
    optimizer, params = new()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    for step in range(at):
        take(optimizer, params, step)
    assert seen == ["pre", "post"] * at
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda _, state: state | {"epoch": 3})
    state = optimizer.state_dict()
    assert (seen[-1], state["epoch"]) == ("before saving", 3)
    # What is inside the hook's hands is whole: with what it removes again, the state loads.
    wrapped = {"inside": state}
    other, others = new()
    other.register_load_state_dict_pre_hook(lambda _, saved: saved["inside"])
    other.register_load_state_dict_post_hook(lambda o: seen.append(o.stage))
    other.load_state_dict(wrapped)
    assert seen[-1] == optimizer.stage
    for param, source in zip(others, params, strict=True):
        param.data.copy_(source.data)
    take(optimizer, params, at)
    take(other, others, at)
    np.testing.assert_array_equal(vector(params), vector(others))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_maximize_climbs_what_minimize_descends(dtype: torch.dtype) -> None:
    up, climbing = new(dtype, maximize=True, max_grad_norm=0.3)
    down, falling = new(dtype, max_grad_norm=0.3)
    for step in range(STEPS):
        grads = gradients(step, 0, climbing)
        set_gradients(climbing, grads)
        set_gradients(falling, [-grad for grad in grads])
        up.step()
        down.step()
        np.testing.assert_array_equal(vector(climbing), vector(falling))


@pytest.mark.parametrize("set_to_none", [True, False])
def test_both_ways_to_zero_gradients(set_to_none: bool) -> None:
    optimizer, params = new()
    other, others = new()
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none)
        loss = sum(((p * g).sum() for p, g in zip(params, gradients(step, 0, params), strict=True)), torch.zeros(()))
        loss.backward()
        optimizer.step()
        take(other, others, step)
        np.testing.assert_array_equal(vector(params), vector(others))
    optimizer.zero_grad(set_to_none)
    assert all((p.grad is None) if set_to_none else not p.grad.any() for p in params)


def test_zero_gradients_without_weight_decay_change_nothing() -> None:
    params = parameters()
    optimizer = OneBitLamb(params, lr=0.1, freeze_step=2, weight_decay=0.0)
    before = vector(params)
    for _ in range(4):
        set_gradients(params, [torch.zeros_like(p) for p in params])
        optimizer.step()
    np.testing.assert_array_equal(vector(params), before)


def test_goes_downhill_in_every_layout() -> None:
    """A linear model whose weight is a transposed view, or lies in channels-last order; freeze_step in the midst."""
    for layout in ("contiguous", "transposed", "channels_last"):
        generator = torch.Generator().manual_seed(0)
        weight = torch.randn(6, 4, 3, 3, generator=generator) * 0.1
        if layout == "transposed":
            weight = weight.transpose(0, 1).contiguous().transpose(0, 1)
        elif layout == "channels_last":
            weight = weight.contiguous(memory_format=torch.channels_last)
        param, bias = torch.nn.Parameter(weight), torch.nn.Parameter(torch.zeros(6))
        target = torch.randn(6, 4, 3, 3, generator=generator)
        optimizer = OneBitLamb([param, bias], lr=0.02, betas=(0.9, 0.99), freeze_step=20)
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = (param + bias.view(6, 1, 1, 1) - target).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[59] < 0.9 * losses[20] < 0.9 * losses[0], layout
        assert param.stride() == weight.stride()


def test_tied_parameters_count_once() -> None:
    embedding = torch.nn.Embedding(11, 5)
    head = torch.nn.Linear(5, 11, bias=False)
    head.weight = embedding.weight
    model = torch.nn.Sequential(embedding, head)
    optimizer = OneBitLamb(model.parameters(), lr=0.05, betas=(0.9, 0.9), freeze_step=5)
    tokens = torch.arange(11)
    losses = []
    for _ in range(15):
        loss = torch.nn.functional.cross_entropy(model(tokens), (tokens + 1) % 11)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert optimizer.metrics()["elements"] == 55
    assert losses[-1] < losses[5] < losses[0]
    assert head.weight is embedding.weight


def test_compiled_model_trains() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = OneBitLamb(compiled.parameters(), lr=0.05, betas=(0.9, 0.9), freeze_step=5)
    data = torch.randn(32, 8)
    losses = []
    for _ in range(20):
        loss = (compiled(data) - data.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert optimizer.stage == "compression"
    assert losses[-1] < losses[5] < losses[0]


def test_a_parameter_thawed_in_compression_needs_another_warmup() -> None:
    optimizer, params = new()
    params[0].requires_grad_(False)

    def steps(count: int) -> None:
        for step in range(count):
            for param, grad in zip(params, gradients(step, 0, params), strict=True):
                param.grad = grad if param.requires_grad else None
            optimizer.step()

    frozen = params[0].detach().clone()
    steps(FREEZE + 2)
    assert torch.equal(params[0], frozen), "not even weight decay moves it"
    params[0].requires_grad_(True)
    steps(2)
    assert torch.equal(params[0], frozen), "it never had a variance, and this group decays nothing"
    assert optimizer.metrics()["masked_elements"] == frozen.numel()
    optimizer.rewarm(2)
    steps(3)
    assert optimizer.stage == "compression"
    assert optimizer.metrics()["masked_elements"] == 0
    assert not torch.equal(params[0], frozen)


def test_complex_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype must be one of .*float32.*, got torch.complex64"):
        OneBitLamb([torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))])


def test_can_be_printed() -> None:
    shown = repr(new()[0])
    assert shown.startswith("OneBitLamb (")
    assert "weight_decay: 0.01" in shown


def test_states_of_equal_optimizers_are_equal() -> None:
    states = []
    for _ in range(2):
        optimizer, params = new()
        for step in range(FREEZE + 1):
            take(optimizer, params, step)
        states.append(optimizer.state_dict())
    first, second = states
    assert first["param_groups"] == second["param_groups"]
    for number, entry in first["state"].items():
        assert entry.keys() == second["state"][number].keys()
        assert all(torch.equal(value, second["state"][number][key]) for key, value in entry.items())
