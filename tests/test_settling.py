"""freeze_step="auto": the warmup ends when what it freezes has settled, and never later than it was told to."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from onebit_triton import OneBitLamb
from onebit_triton.settling import LOOKS, TRUST_RATIO, VARIANCE, Look, Settling, lag_of

from .ranks import RankPool
from .training import gradients, logged, parameters, set_gradients, vector

BETA2 = 0.97
LAG = 33


def look(step: int, variance: float = 1.0, trust_ratio: float = 1.0, *rates: float) -> Look:
    return Look(step, variance, trust_ratio, rates or (0.1,))


@pytest.mark.parametrize(
    ("before", "now", "settles"),
    [
        (look(1), look(11), True),
        (look(2), look(11), False),
        (look(1), look(11, 0.99 * VARIANCE), True),
        (look(1), look(11, 1.01 * VARIANCE), False),
        (look(1), look(11, 1.01 / VARIANCE), True),
        (look(1), look(11, 0.99 / VARIANCE), False),
        (look(1), look(11, 1.0, 0.99 * TRUST_RATIO), True),
        (look(1), look(11, 1.0, 1.01 * TRUST_RATIO), False),
        (look(1), look(11, 1.0, 0.99 / TRUST_RATIO), False),
        (look(1), look(11, 1.0, 1.0, 0.09), True),
        (look(1), look(11, 1.0, 1.0, 0.11), False),
        (look(1), look(11, 1.0, 1.0, 0.1, 0.1), False),
        (look(1, 0.0, 0.0), look(11, 0.0, 0.0), False),
        (look(1, 0.0), look(11), False),
        (look(1), look(11, float("inf")), False),
    ],
)
def test_every_condition_counts(before: Look, now: Look, settles: bool) -> None:
    said = Settling([before]).settled(now, 10)
    assert bool(said) == settles
    if said:
        assert f"|v|_1 is {now.variance:.3f} times and trust ratios are {now.trust_ratio:.3f} times" in said
        assert "10 steps before" in said


def test_a_first_look_and_a_repeated_one_say_nothing() -> None:
    settling = Settling()
    assert settling.settled(look(5), 0) is None
    assert settling.settled(look(5), 0) is None
    assert settling.settled(look(6), 1)
    assert [seen.step for seen in settling.looks] == [5, 6]


def test_no_more_is_kept_than_is_compared_with() -> None:
    settling = Settling()
    for step in range(1, 200):
        settling.settled(look(step), 20)
    assert [seen.step for seen in settling.looks] == list(range(179, 200))
    assert Settling.from_lists(settling.to_lists()).looks == settling.looks


def train(
    optimizer: OneBitLamb, params: list[Any], rank: int, steps: range, rates: Any = None
) -> list[tuple[str, float]]:
    """Train; the stage and |v|_1 after every step. Gradients grow for 20 steps."""
    seen = []
    for step in steps:
        grads = [grad * min(1.0, 0.1 + step / 20) for grad in gradients(step, rank, params)]
        set_gradients(params, grads)
        if rates is not None:
            optimizer.param_groups[0]["lr"] = rates(step)
        optimizer.step()
        variances = [optimizer.state[p]["exp_avg_sq"].double().abs().sum() for p in params if p.numel()]
        seen.append((optimizer.stage, float(sum(variances))))
    return seen


def automatic(params: list[Any], **options: Any) -> OneBitLamb:
    defaults: dict[str, Any] = {
        "lr": 0.001, "freeze_step": "auto", "max_freeze_step": 300, "betas": (0.9, BETA2), "block_elements": 64,
        "bucket_elements": 256, "backend": "torch",
    }  # fmt: skip
    return OneBitLamb(params, **(defaults | options))


def switch(seen: list[tuple[str, float]]) -> int | None:
    """The step, from 1, after which compression begins."""
    stages = [stage for stage, _ in seen]
    return stages.index("compression") + 1 if "compression" in stages else None


def test_the_switch_comes_when_the_variance_has_settled() -> None:
    """The rule, worked out from |v|_1 after every step: trust ratios hardly move here and the rate does not rise."""
    params = parameters()
    optimizer = automatic(params)
    assert lag_of(optimizer.param_groups) == LAG
    with logged() as records:
        seen = train(optimizer, params, 0, range(150))
    norms = [norm / (1 - BETA2 ** (step + 1)) for step, (_, norm) in enumerate(seen)]
    looks = range(1, 150, LAG // LOOKS)
    settled = [
        step for step in looks
        if any(old <= step - LAG for old in looks) and 1 / VARIANCE <= norms[step - 1] / norms[max(
            old for old in looks if old <= step - LAG) - 1] <= VARIANCE
    ]  # fmt: skip
    assert switch(seen) == settled[0] > 40
    told = [record for record in records if "has ended by itself" in record]
    assert len(told) == 1
    assert f"step {settled[0]}: " in told[0]


def test_it_comes_no_later_than_told() -> None:
    params = parameters()
    optimizer = automatic(params, max_freeze_step=50)
    assert optimizer.metrics()["steps_to_switch"] == 50
    with logged() as records:
        assert switch(train(optimizer, params, 0, range(55))) == 50
    assert not any("has ended by itself" in record for record in records)


def test_it_waits_for_the_learning_rate() -> None:
    params = parameters()
    ends = switch(train(automatic(params), params, 0, range(250), lambda step: 1e-5 * min(step + 1, 180)))
    assert ends is not None
    assert 180 <= ends <= 180 + 2 * (LAG // LOOKS)


def test_it_waits_for_trust_ratios() -> None:
    """They follow a weight that is made to grow by a fiftieth in every step; it is most of the elements."""
    params = parameters(shapes=[(60, 60), (4,)])
    optimizer = automatic(params, max_freeze_step=150)
    for step in range(150):
        assert optimizer.stage == "warmup"
        train(optimizer, params, 0, range(step, step + 1))
        params[0].data.mul_(1.02)


def test_a_look_is_what_the_formulas_say() -> None:
    params = parameters()
    optimizer = automatic(params)
    ratios = []
    for step in range(20):
        train(optimizer, params, 0, range(step, step + 1))
        ratios.append(torch.tensor(optimizer.metrics()["trust_ratio"], dtype=torch.float64))
    mean = sum(0.1 * 0.9 ** (19 - step) * ratio for step, ratio in enumerate(ratios)) / (1 - 0.9**20)
    sizes = torch.tensor([float(p.numel()) for p in params])
    norm = sum(float(optimizer.state[p]["exp_avg_sq"].double().sum()) for p in params) / (1 - BETA2**20)
    seen = Look.take(optimizer._replica, 20, optimizer.param_groups)
    assert seen.variance == pytest.approx(norm, rel=1e-6)
    assert seen.trust_ratio == pytest.approx(float(((mean.log() * sizes).sum() / sizes.sum()).exp()), rel=1e-5)
    assert (seen.step, seen.rates) == (20, (0.001,))


def test_nothing_to_settle() -> None:
    params = parameters(shapes=[(0, 3)])
    optimizer = automatic(params, max_freeze_step=3)
    assert switch(train(optimizer, params, 0, range(4))) == 3


def test_rewarm_has_a_fixed_length() -> None:
    params = parameters()
    optimizer = automatic(params, max_freeze_step=3)
    train(optimizer, params, 0, range(4))
    optimizer.rewarm(5)
    assert [stage for stage, _ in train(optimizer, params, 0, range(4, 10))] == ["warmup"] * 4 + ["compression"] * 2


def together(rank: int, ranks: int, blind: int | None) -> Any:
    """Train on all ranks; to one of them nothing ever seems to settle."""
    params = parameters()
    optimizer = automatic(params, betas=(0.9, 0.9))
    hidden = mock.patch.object(Settling, "settled", return_value=None) if blind == rank else nullcontext()
    with logged() as records, hidden:
        seen = train(optimizer, params, rank, range(80))
    return switch(seen), vector(params), records


@pytest.mark.distributed
def test_rank_0_decides_for_all(ranks: RankPool) -> None:
    both = [ranks(2, together, blind) for blind in (None, 1, 0)]
    for seen in both:
        assert seen[0][0] == seen[1][0]
        np.testing.assert_array_equal(seen[0][1], seen[1][1])
    assert both[0][0][0] == both[1][0][0] is not None
    assert both[2][0][0] is None
    assert any("has ended by itself" in record for record in both[0][0][2])
    assert not both[0][1][2]


def resumed(rank: int, ranks: int, at: list[int]) -> Any:
    """Save along one run; what runs that resume from there do."""
    params = parameters()
    optimizer = automatic(params, betas=(0.9, 0.9))
    states, seen = {}, []
    for step in range(80):
        if step in at:
            states[step] = optimizer.state_dict(), [p.detach().clone() for p in params]
        seen += train(optimizer, params, rank, range(step, step + 1))
    found = []
    for step, (state, values) in states.items():
        again = [torch.nn.Parameter(value) for value in values]
        other = automatic(again, betas=(0.5, 0.5), freeze_step=7, max_freeze_step=None)  # what was saved counts
        other.load_state_dict(state)
        found.append((switch(seen[:step] + train(other, again, rank, range(step, 80))), vector(again)))
    return switch(seen), vector(params), found


@pytest.mark.distributed
@pytest.mark.parametrize("n", [1, 2])
def test_a_resumed_warmup_ends_where_it_would_have(ranks: RankPool, n: int) -> None:
    for switched, params, found in ranks(n, resumed, [3, 20, 40, 75]):
        assert switched is not None
        for other_switched, other_params in found:
            assert other_switched == switched
            np.testing.assert_array_equal(other_params, params)
