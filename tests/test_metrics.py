"""What metrics() says, against what can be computed from outside, on one process."""

from __future__ import annotations

import inspect
import math
import re
from itertools import count
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import pytest
import torch

from onebit_triton import OneBitLamb, clock
from onebit_triton.clock import Clock
from onebit_triton.kernels.tables import Rate
from onebit_triton.metrics import BOUNDS, VarianceHistory

from .training import gradients, parameters, set_gradients, two_groups


def train(optimizer: OneBitLamb, params: list[Any], steps: range, scale: float = 1.0) -> None:
    for step in steps:
        set_gradients(params, [g * scale for g in gradients(step, 0, params)])
        optimizer.step()


def test_every_key_is_described() -> None:
    params = parameters()
    described = set(re.findall(r"\w+", inspect.getdoc(OneBitLamb.metrics) or ""))
    optimizer = two_groups(params, backend="torch")
    found = optimizer.metrics()
    assert set(found) <= described
    assert set(found["clipped"]) <= described
    per_layer = [key for key, value in found.items() if isinstance(value, list)]
    assert {len(found[key]) for key in per_layer} == {len(params)}
    assert len(per_layer) == 9


def test_stages_before_and_after_the_switch() -> None:
    params = parameters()
    optimizer = two_groups(params, backend="torch", freeze_step=2)
    seen = []
    for step in range(4):
        found = optimizer.metrics()
        seen.append((found["last_stage"], found["stage"], found["steps_to_switch"]))
        train(optimizer, params, range(step, step + 1))
    assert seen == [
        (None, "warmup", 2), ("warmup", "warmup", 1), ("warmup", "compression", 0), ("compression", "compression", 0),
    ]  # fmt: skip
    optimizer.rewarm(3)
    found = optimizer.metrics()
    assert (found["last_stage"], found["stage"], found["steps_to_switch"]) == ("compression", "warmup", 3)
    loaded = two_groups(parameters(), backend="torch")
    train(loaded, params, range(1))
    loaded.load_state_dict(optimizer.state_dict())
    assert loaded.metrics()["last_stage"] is None
    assert loaded.metrics()["clipped_by"] == [None] * len(params)


CLIPPED: list[tuple[str, dict[str, Any], float]] = [
    ("max_coeff", {"max_coeff": 0.02}, 1.0),
    ("min_coeff", {"min_coeff": 2.0, "max_coeff": 9.0}, 1.0),
    ("max_rate_ratio", {"max_rate_ratio": 0.5}, 0.0),
    ("factor_max", {"factor_max": 1.05, "factor_threshold": 0.9}, 0.0),
    ("factor_min", {"factor_min": 0.9, "factor_threshold": 0.9}, 9.0),
    ("threshold_high", {"factor_threshold": 0.001}, 0.0),
    ("threshold_low", {"factor_threshold": 0.001}, 9.0),
]
"""Bound, options that make it bind, and the scale of the gradients after the switch."""


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(("bound", "options", "scale"), CLIPPED, ids=[case[0] for case in CLIPPED])
def test_the_bound_that_clipped_is_named(bound: str, options: dict[str, Any], scale: float, backend: str) -> None:
    """Every layer's value is, to the bit, the bound that is named, or else what it was before its bounds."""
    params = parameters(shapes=[(9, 7), (5,)])
    chosen: dict[str, Any] = {"weight_decay": 0.01, "betas": (0.9, 0.9), "block_elements": 64, **options}
    optimizer = OneBitLamb(params, lr=1e-4, freeze_step=4, backend=backend, **chosen)
    named = set()
    last = [1.0] * len(params)
    for step in range(9):
        train(optimizer, params, range(step, step + 1), 1.0 if step < 4 else scale)
        found = optimizer.metrics()
        assert found["clipped"] == {name: found["clipped_by"].count(name) for name in BOUNDS}
        for layer, name in enumerate(found["clipped_by"]):
            named.add(name)
            if name == "max_rate_ratio":  # it bounds C f, whatever became of f
                rates = optimizer._replica.rates[layer]
                coeff = (rates[Rate.COEFF] / rates[Rate.COEFF_CORRECTION]).item()
                assert found["trust_ratio"][layer] < np.float32(coeff) * np.float32(found["factor"][layer])
                continue
            value = found["trust_ratio" if step < 4 else "factor"][layer]
            threshold = np.float32(last[layer]) * np.float32(1 + chosen.get("factor_threshold", 0.1))
            low = np.float32(last[layer]) * np.float32(1 - chosen.get("factor_threshold", 0.1))
            bounds = {"threshold_high": threshold, "threshold_low": low, None: found["unclipped"][layer]}
            expected = bounds[name] if name in bounds else optimizer.param_groups[0][name]
            assert np.float32(value) == np.float32(expected), (step, layer, name)
            above = name is not None and name.endswith(("max_coeff", "factor_max", "high"))
            assert name is None or (found["unclipped"][layer] > value) == above
        last = found["factor"]
    assert bound in named


def test_a_layer_without_a_norm_is_not_clipped() -> None:
    """Its ratio is 1 whatever the bounds are."""
    param = torch.nn.Parameter(torch.zeros(4))
    optimizer = OneBitLamb([param], max_coeff=0.3, backend="torch")
    param.grad = torch.ones(4)
    optimizer.step()
    found = optimizer.metrics()
    assert (found["trust_ratio"], found["clipped_by"]) == ([1.0], [None])


def test_a_skipped_step_leaves_the_layers_numbers() -> None:
    params = parameters()
    optimizer = two_groups(params, backend="torch", factor_threshold=0.001)
    train(optimizer, params, range(7))
    before = optimizer.metrics()
    train(optimizer, params, range(7, 8), math.nan)
    after = optimizer.metrics()
    assert after["skipped_steps"] == 1
    for key in ("step", "trust_ratio", "factor", "unclipped", "clipped_by", "clipped", "fresh_variance_ratio"):
        assert after[key] == before[key], key


def test_variance_that_has_settled() -> None:
    """Gradients of one size: v, filling up, is as large as it will be from the start; twice as large: four times."""
    param = torch.nn.Parameter(torch.ones(8))
    optimizer = OneBitLamb([param], betas=(0.9, 0.8), freeze_step=100, backend="torch")
    seen = []
    for step in range(15):
        param.grad = torch.full((8,), 1.0 if step < 9 else 2.0)
        optimizer.step()
        seen.append(optimizer.metrics()["variance_stability"][0])
    assert seen[:5] == [None] * 5  # measured from step 1 on, and compared over 1 / (1 - 0.8) steps
    assert seen[5:9] == pytest.approx([1.0] * 4, rel=1e-5)
    filled = 1 - 0.8**10
    assert seen[9] == pytest.approx((0.8 * (1 - 0.8**9) + 0.2 * 4) / filled, rel=1e-5)
    assert seen[13] == pytest.approx((4 - 3 * 0.8**5 - 0.8**14) / (1 - 0.8**14), rel=1e-4)


def test_stability_of_layers_with_memories_of_their_own() -> None:
    history = VarianceHistory()
    shares = torch.tensor([0.5, 0.25], dtype=torch.float64)
    seen = [history.stability(step, torch.tensor([2.0**step, 3.0**step]), shares) for step in (1, 2, 3, 5, 9)]
    assert seen == [[None, None], [None, None], [4.0, None], [4.0, 81.0], [16.0, 81.0]]
    assert VarianceHistory().stability(1, torch.zeros(0), torch.zeros(0)) == []


def test_history_is_thinned_and_forgotten() -> None:
    history, share = VarianceHistory(), torch.tensor([0.001], dtype=torch.float64)
    for step in range(5000):
        stability = history.stability(step, torch.tensor([float(step + 1)]), share)
    assert len(history._seen) <= 70
    assert stability == [pytest.approx(5000 / 4000, rel=0.02)]
    params = parameters()
    optimizer = two_groups(params, backend="torch", freeze_step=1)
    for step in range(2):
        train(optimizer, params, range(step, step + 1))
        optimizer.metrics()
    assert optimizer._variances._seen
    optimizer.rewarm(5)
    assert not optimizer._variances._seen


def test_fresh_variance_decays_without_gradients() -> None:
    params = parameters()
    optimizer = OneBitLamb(params, betas=(0.9, 0.7), freeze_step=2, backend="torch")
    train(optimizer, params, range(2))
    assert optimizer.metrics()["fresh_variance_ratio"] == pytest.approx([1.0] * len(params))
    train(optimizer, params, range(2, 5), 0.0)
    assert optimizer.metrics()["fresh_variance_ratio"] == pytest.approx([0.7**3] * len(params), rel=1e-5)


def test_fresh_variance_of_masked_layers() -> None:
    params = [torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))]
    optimizer = OneBitLamb(params, freeze_step=1, backend="torch")
    for _ in range(2):
        params[0].grad = torch.ones(4)
        optimizer.step()
    found = optimizer.metrics()
    assert found["fresh_variance_ratio"] == [pytest.approx(1.999, rel=1e-5), None]
    assert (found["masked_elements"], found["clipped_by"][1], found["unclipped"][1]) == (4, None, 1.0)


class Waiting:
    def __init__(self) -> None:
        self.waited = 0

    def wait(self) -> None:
        self.waited += 1


def test_clock_tells_waiting_from_the_rest() -> None:
    work, found = Waiting(), Clock()
    assert found.read() == (0.0, 0.0)
    with mock.patch.object(clock.time, "perf_counter", side_effect=[0.0, 1.0, 3.0, 4.0, 8.0, 10.0, 20.0, 21.0]):
        found.start(False)
        found.wait(work)
        found.wait(work)
        found.stop()
        assert found.read() == (6.0, 4.0)
        found.wait(work)  # outside a step
        assert found.read() == (6.0, 4.0)
        found.start(False)
        found.stop()
        assert found.read() == (0.0, 1.0)
    assert work.waited == 3


class Event:
    """A CUDA event by a clock of its own, in milliseconds."""

    made: ClassVar[list[Event]] = []
    now = count(step=500)

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.synchronised = 0
        self.made.append(self)

    def record(self) -> None:
        self.at = next(self.now)

    def synchronize(self) -> None:
        self.synchronised += 1

    def elapsed_time(self, later: Event) -> float:
        assert later.at >= self.at
        return later.at - self.at


def test_clock_on_cuda_makes_its_events_once_and_waits_only_to_be_read() -> None:
    with mock.patch.object(torch.cuda, "Event", Event):
        found = Clock()
        for _ in range(3):
            found.start(True)
            found.wait(Waiting())
            found.stop()
        assert len(Event.made) == 4
        assert not any(event.synchronised for event in Event.made)
        assert found.read() == (0.5, 1.0)
        assert Event.made[-1].synchronised == 1


def test_one_process_sends_and_saves_nothing() -> None:
    params = parameters()
    optimizer = two_groups(params, backend="torch", freeze_step=1)
    train(optimizer, params, range(3))
    found = optimizer.metrics()
    assert found["bytes_sent"] == found["bytes_saved"] == {"warmup": 0, "compression": 0}
    assert found["bytes_saved_last_step"] == found["exchange_seconds"] == 0
    assert found["pass_seconds"] > 0
    assert found["ranks"] == 1
    assert found["layer_error_ratio"] == [0.0] * len(params)
