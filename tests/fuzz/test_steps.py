"""The optimizer does what the formulas say, whatever happens to it: plans, run by real ranks, judged by the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ..ranks import RankPool
from .judge import Judge
from .plans import WORLD, Consolidate, Group, Move, Plan, Resume, Rewarm, Step, Tensor, plans
from .run import run_plans

EXAMPLES = settings.default.max_examples

OVERFLOW = Plan(
    (Group((Tensor((70,)),)),),
    {
        "freeze_step": 1, "block_elements": 64, "bucket_elements": 64, "backend": "torch", "max_grad_norm": 1.0,
        "bias_correction": True, "coeff_bias_correction": True, "maximize": False, "scale": "rms",
    },
    (Step(bad=(1, 3, 3e30)), Step(), Step(), Step(bad=(1, 3, 3e30)), Step()),
)  # fmt: skip
"""A gradient that is finite, and its square is not, while gradients are clipped."""

MASKED = Plan(
    (Group((Tensor((5, 13)),), masked=0.2), Group((Tensor((1,)), Tensor((0,))))),
    {
        "freeze_step": 1, "block_elements": 64, "bucket_elements": 64, "backend": "torch", "max_grad_norm": None,
        "bias_correction": False, "coeff_bias_correction": True, "maximize": False, "scale": "rms",
    },
    (Step(), Resume(), Step(), Consolidate(), Step(), Move(3), Step(), Rewarm(1), Step(), Step()),
)  # fmt: skip


EMPTY = Plan(
    (Group((Tensor((3, 0)), Tensor((0,)))),), MASKED.options,
    (Step(), Step(), Step(bad=(1, 3, 3e30)), Step(), Resume(), Step(), Move(2), Step(), Rewarm(1), Step(), Step()),
    ranks=3,
)  # fmt: skip
"""Nothing to exchange; steps count all the same."""


def with_kernels(plan: Plan) -> Plan:
    return replace(plan, options=plan.options | {"backend": "triton"})


def follow(ranks: RankPool, cases: list[Plan]) -> None:
    """Run plans, all of them in one call, and judge each."""
    seen = ranks(WORLD, run_plans, cases)
    for number, plan in enumerate(cases):
        Judge(plan).judge([one[number] for one in seen])


@pytest.mark.slow
@pytest.mark.distributed
@settings(max_examples=max(1, EXAMPLES // 10))
@given(st.lists(plans(), min_size=1, max_size=8))
@example([MASKED, OVERFLOW, EMPTY])
def test_steps(ranks: RankPool, cases: list[Plan]) -> None:
    """Several plans in a call, which costs more than they do; shrinking leaves the one that fails."""
    follow(ranks, cases)


@pytest.mark.slow
@pytest.mark.distributed
@settings(max_examples=max(1, EXAMPLES // 50))
@given(plans("triton", most_ranks=2, most_steps=8))
@example(with_kernels(MASKED))
@example(with_kernels(OVERFLOW))
def test_steps_with_kernels(ranks: RankPool, plan: Plan) -> None:
    """In Triton's interpreter, which takes its time."""
    follow(ranks, [plan])
