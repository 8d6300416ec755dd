"""Parameters of lower precision: masters, mixed dtypes, autocast, and torch's loss scalers."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch.amp import GradScaler

from onebit_triton import OneBitLamb
from onebit_triton.kernels.budgets import step_bytes

from .training import gradients, parameters, set_gradients, two_groups, vector

LOW = (torch.bfloat16, torch.float16)
FREEZE = 3


def masters(optimizer: OneBitLamb, params: list[Any]) -> list[torch.Tensor]:
    return [optimizer.state[p]["master"] for p in params]


@pytest.mark.parametrize(
    ("dtype", "backend"),
    [*((dtype, name) for dtype in LOW for name in ("torch", "triton")), (LOW[0], "inductor")],
    ids=str,
)
def test_masters_are_what_fp32_parameters_would_be(dtype: torch.dtype, backend: str) -> None:
    """The same gradients, representable in both dtypes, to parameters and to an fp32 copy of them."""
    low, full = parameters(dtype), [torch.nn.Parameter(p.detach().float()) for p in parameters(dtype)]
    optimizer, reference = (two_groups(p, freeze_step=FREEZE, backend=backend) for p in (low, full))
    for step in range(2 * FREEZE):
        grads = gradients(step, 0, low)
        set_gradients(low, grads)
        set_gradients(full, [grad.float() for grad in grads])
        optimizer.step()
        reference.step()
        for param, master, exact in zip(low, masters(optimizer, low), full, strict=True):
            assert torch.equal(master, exact)
            assert torch.equal(param, exact.to(dtype))


def test_small_updates_add_up() -> None:
    """Each is far below the last bit of a bf16 parameter."""
    param = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = OneBitLamb([param], lr=1e-4, weight_decay=0.0, freeze_step=20)
    for _ in range(100):
        param.grad = torch.ones_like(param)
        optimizer.step()
    assert 0.9 < param.float().mean().item() < 0.995


def test_state_grows_by_the_masters_and_nothing_else() -> None:
    for stage in ("warmup", "compression"):
        held = {}
        for dtype in (torch.float32, torch.bfloat16):
            params = parameters(dtype)
            optimizer = two_groups(params, freeze_step=FREEZE)
            for step in range(2 if stage == "warmup" else 2 * FREEZE):
                set_gradients(params, gradients(step, 0, params))
                optimizer.step()
            assert optimizer.stage == stage
            held[dtype] = optimizer.metrics()["state_bytes"]
        padded = optimizer.metrics()["padded_elements"]
        assert held[torch.bfloat16] - held[torch.float32] == 4 * padded


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("stage", ["warmup", "compression", "uncompressed"])
def test_a_bf16_step_moves_no_more_than_an_fp32_one(stage: str, ranks: int) -> None:
    assert step_bytes(stage, ranks, param=2, grad=2) <= step_bytes(stage, ranks)


@pytest.mark.parametrize("in_place", [True, False], ids=["written", "replaced"])
@pytest.mark.parametrize("at", [1, FREEZE + 1])
def test_masters_follow_what_others_write(at: int, in_place: bool) -> None:
    """Loading a model after building its optimizer must not be undone by the next step."""
    params = parameters(torch.bfloat16)
    optimizer = two_groups(params, freeze_step=FREEZE)
    for step in range(at):
        set_gradients(params, gradients(step, 0, params))
        optimizer.step()
    kept = [master.clone() for master in masters(optimizer, params)]
    written = torch.full_like(params[3], 0.75)
    written[:7] = params[3][:7]
    with torch.no_grad():
        for number, param in enumerate(params):
            source = written if number == 3 else param.clone()  # a model's state with one tensor changed
            if in_place:
                param.copy_(source)
            else:
                param.data = source
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    set_gradients(params, gradients(at, 0, params))
    optimizer.step()
    now = masters(optimizer, params)
    for number in (0, 1, 2, 4, 5):
        assert torch.equal(now[number], kept[number]), "what still rounds to the parameter keeps its bits"
    assert torch.equal(now[3][:7], kept[3][:7])
    assert (now[3][7:] == 0.75).all()
    assert torch.equal(params[3], written)


@pytest.mark.parametrize("at", [2, FREEZE, FREEZE + 2])
@pytest.mark.parametrize("model_first", [True, False])
def test_masters_are_saved_and_loaded(at: int, model_first: bool) -> None:
    params, others = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer, other = two_groups(params, freeze_step=FREEZE), two_groups(others, freeze_step=FREEZE)
    for step in range(at):
        set_gradients(params, gradients(step, 0, params))
        optimizer.step()

    def load_model() -> None:
        with torch.no_grad():
            for target, source in zip(others, params, strict=True):
                target.copy_(source)

    steps = [load_model, lambda: other.load_state_dict(copy.deepcopy(optimizer.state_dict()))]
    for load in steps if model_first else reversed(steps):
        load()
    for step in range(at, at + 3):
        for p, o in ((params, optimizer), (others, other)):
            set_gradients(p, gradients(step, 0, p))
            o.step()
    for mine, theirs in zip(masters(optimizer, params), masters(other, others), strict=True):
        assert torch.equal(mine, theirs)


def test_a_state_without_masters_starts_them_from_the_parameters() -> None:
    full, low = parameters(), parameters(torch.bfloat16)
    optimizer, other = two_groups(full, freeze_step=FREEZE), two_groups(low, freeze_step=FREEZE)
    set_gradients(full, gradients(0, 0, full))
    optimizer.step()
    with torch.no_grad():
        for target, source in zip(low, full, strict=True):
            target.copy_(source)
    other.load_state_dict(optimizer.state_dict())
    for param, master in zip(low, masters(other, low), strict=True):
        assert torch.equal(master, param.float())


def test_wrong_shape_of_a_master_is_refused() -> None:
    params = parameters(torch.bfloat16)
    optimizer = two_groups(params)
    state = optimizer.state_dict()
    state["state"][1]["master"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"'master' of parameter 1 of group 0 must have shape \(5,\), got \(3,\)"):
        optimizer.load_state_dict(state)


def test_group_added_in_warmup_keeps_masters() -> None:
    params = parameters(torch.bfloat16)
    optimizer = OneBitLamb(params[:3], lr=0.01, freeze_step=FREEZE)
    set_gradients(params, gradients(0, 0, params))
    optimizer.step()
    kept = [master.clone() for master in masters(optimizer, params[:3])]
    optimizer.add_param_group({"params": params[3:]})
    for master, before in zip(masters(optimizer, params[:3]), kept, strict=True):
        assert torch.equal(master, before)


def test_mixed_dtypes_train_in_one_optimizer() -> None:
    dtypes = itertools.cycle((torch.float32, torch.bfloat16, torch.float16))
    params = [torch.nn.Parameter(p.detach().to(dtype)) for p, dtype in zip(parameters(), dtypes, strict=False)]
    full = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer, reference = (OneBitLamb(p, lr=0.01, freeze_step=FREEZE, block_elements=64) for p in (params, full))
    for step in range(2 * FREEZE):
        grads = gradients(step, 0, params)
        set_gradients(params, grads)
        set_gradients(full, [grad.float() for grad in grads])
        optimizer.step()
        reference.step()
    assert optimizer.stage == "compression"
    for param, exact in zip(params, full, strict=True):
        torch.testing.assert_close(param.float(), exact.to(param.dtype).float())


class Classifier(torch.nn.Module):
    """A small model, to be run under autocast."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
        self.data, self.labels = torch.randn(64, 16), torch.randint(0, 4, (64,))

    def loss(self) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layers(self.data).float(), self.labels)


def train(low: torch.dtype | None, scaler: GradScaler | None = None, parameters_too: bool = False) -> list[float]:
    """Losses of 40 steps, in fp32, under autocast to a dtype, or with parameters of that dtype."""
    model = Classifier()
    if parameters_too:
        model.layers.to(low)
        model.data = model.data.to(low)
    optimizer = OneBitLamb(model.parameters(), lr=0.03, betas=(0.9, 0.95), freeze_step=15)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=low or torch.bfloat16, enabled=low is not None and not parameters_too):
            loss = model.loss()
        if scaler is None:
            loss.backward()
            optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        losses.append(loss.item())
    assert optimizer.stage == "compression"
    return losses


def test_autocast_and_scalers_reach_the_loss_of_fp32() -> None:
    wanted = train(None)
    assert wanted[-1] < 0.8 * wanted[15] < 0.8 * wanted[0]
    for dtype, scaled, parameters_too in itertools.product(LOW, (False, True), (False, True)):
        scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=8) if scaled else None
        losses = train(dtype, scaler, parameters_too)
        assert losses[-1] == pytest.approx(wanted[-1], rel=0.03), (dtype, scaled, parameters_too)
        if scaler is not None:
            assert scaler.get_scale() > 2.0**10, "it grew"


@pytest.mark.parametrize("unscaled", [False, True], ids=["step unscales", "user unscales"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_power_of_two_changes_nothing(backend: str, unscaled: bool) -> None:
    """Scaling by it is exact, so a scaled run is the run without a scaler bit for bit, clipping included."""
    params, plain = parameters(), parameters()
    options: dict[str, Any] = {"freeze_step": FREEZE, "backend": backend, "max_grad_norm": 0.1}
    optimizer, reference = two_groups(params, **options), two_groups(plain, **options)
    scaler = GradScaler("cpu", init_scale=2.0**12)
    scaler.scale(torch.ones(()))
    for step in range(2 * FREEZE):
        grads = gradients(step, 0, params)
        set_gradients(params, [grad * 2.0**12 for grad in grads])
        set_gradients(plain, grads)
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        reference.step()
        np.testing.assert_array_equal(vector(params), vector(plain))
        assert optimizer.metrics()["grad_scale"] == reference.metrics()["grad_scale"] < 1.0


def test_steps_without_the_scaler_are_not_unscaled() -> None:
    params, plain = parameters(), parameters()
    optimizer, reference = two_groups(params, freeze_step=FREEZE), two_groups(plain, freeze_step=FREEZE)
    scaler = GradScaler("cpu", init_scale=2.0**12)
    scaler.scale(torch.ones(()))
    for step in range(2 * FREEZE):
        grads, scaled = gradients(step, 0, params), step % 2 == 0
        set_gradients(params, [grad * (2.0**12 if scaled else 1.0) for grad in grads])
        set_gradients(plain, grads)
        if scaled:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        reference.step()
        np.testing.assert_array_equal(vector(params), vector(plain))


def test_a_wrapped_step_is_unscaled_too() -> None:
    """Accelerate hides the signature of step, and so gets torch's newer protocol: attributes for the time of a step."""
    params, plain = parameters(), parameters()
    optimizer, reference = two_groups(params, freeze_step=FREEZE), two_groups(plain, freeze_step=FREEZE)
    original = optimizer.step
    optimizer.step = lambda *args, **kwargs: original(*args, **kwargs)  # type: ignore[method-assign]
    scaler = GradScaler("cpu", init_scale=2.0**12)
    scaler.scale(torch.ones(()))
    for step in range(2 * FREEZE):
        grads = gradients(step, 0, params)
        set_gradients(params, [grad * scaler.get_scale() for grad in grads])
        set_gradients(plain, grads)
        if step == 1:
            params[0].grad[0] = float("inf")
            plain[0].grad[0] = float("nan")
        scaler.step(optimizer)
        scaler.update()
        reference.step()
        np.testing.assert_array_equal(vector(params), vector(plain))
    assert scaler.get_scale() == 2.0**11


@pytest.mark.parametrize("at", [1, FREEZE + 2])
def test_scaler_backs_off_when_a_step_is_skipped(at: int) -> None:
    params = parameters(torch.float16)
    optimizer = two_groups(params, freeze_step=FREEZE)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(torch.ones(()))
    for step in range(2 * FREEZE):
        set_gradients(params, [grad * scaler.get_scale() for grad in gradients(step, 0, params)])
        if step == at:
            params[2].grad.fill_(float("inf"))
        before = vector(params)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (2.0**9 if step >= at else 2.0**10)
        assert (vector(params) == before).all() == (step == at)
    assert optimizer.metrics()["skipped_steps"] == 1
