"""freeze_step="auto": when a warmup may end, because what the switch freezes has settled.

Three conditions, looked at now and then: the variance is what it was 1 / (1 - beta2) steps before, the rule of 1-bit
Adam (Tang et al., arXiv 2102.02888), here in both directions, since it grows as often as it shrinks; so are the running
trust ratios; and no learning rate is rising.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .kernels.variance_reference import running_trust_ratio
from .stages import Replica

LOOKS = 16
"""Looks in 1 / (1 - beta2) steps."""

VARIANCE = 1.1
"""|v|_1 has settled when it is at most so many times what it was, and at least one over that."""

TRUST_RATIO = 1.25
"""The same of the trust ratios."""


@dataclass(frozen=True)
class Look:
    """What a look at the warmup saw.

    Attributes:
        step: counted steps.
        variance: sum of `Replica.variance_norms`.
        trust_ratio: geometric mean of C over all elements.
        rates: learning rate of every param group.
    """

    step: int
    variance: float
    trust_ratio: float
    rates: tuple[float, ...]

    @classmethod
    def take(cls, replica: Replica, step: int, param_groups: list[dict[str, Any]]) -> Look:
        """Look at a warmup (synchronises)."""
        if not replica.buckets:
            return cls(step, 0.0, 0.0, ())
        hyper, rates = replica.hyper.double(), replica.rates.double()
        norms = replica.variance_norms()
        sizes = torch.tensor([size for bucket in replica.buckets for size in bucket.map.sizes]).to(norms)
        ratio = (running_trust_ratio(hyper, rates).log() * sizes).sum() / sizes.sum()
        return cls(step, float(norms.sum()), float(ratio.exp()), tuple(float(group["lr"]) for group in param_groups))


class Settling:
    """Decides whether a warmup may end, from what it looks like now and looked like before.

    Args:
        looks: earlier ones, in the order of their steps.
    """

    def __init__(self, looks: Sequence[Look] = ()) -> None:
        self.looks = list(looks)

    @classmethod
    def from_lists(cls, looks: list[list[float]]) -> Settling:
        """What `to_lists` has saved."""
        return cls([Look(int(step), variance, ratio, tuple(rates)) for step, variance, ratio, *rates in looks])

    def to_lists(self) -> list[list[float]]:
        """All looks as plain numbers."""
        return [[look.step, look.variance, look.trust_ratio, *look.rates] for look in self.looks]

    def settled(self, now: Look, lag: int) -> str | None:
        """Whether all three conditions hold.

        Args:
            now: a look at the warmup.
            lag: how many steps before is compared with.

        Returns:
            The numbers, as a sentence; or None, if they do not hold, or it was not looked at so long ago.
        """
        last = self.looks[-1] if self.looks else None
        if last is not None and last.step >= now.step:  # a step was skipped
            return None
        self.looks.append(now)
        while len(self.looks) > 1 and self.looks[1].step <= now.step - lag:
            del self.looks[0]
        before = self.looks[0]
        if last is None or before.step > now.step - lag or not _positive(before, now):
            return None
        variance, ratio = now.variance / before.variance, now.trust_ratio / before.trust_ratio
        rising = len(last.rates) != len(now.rates) or any(
            rate > old for rate, old in zip(now.rates, last.rates, strict=True)
        )
        if rising or not (_within(variance, VARIANCE) and _within(ratio, TRUST_RATIO)):
            return None
        return (
            f"|v|_1 is {variance:.3f} times and trust ratios are {ratio:.3f} times what they were "
            f"{now.step - before.step} steps before, and no learning rate rises"
        )


def lag_of(param_groups: list[dict[str, Any]]) -> int:
    """The longest memory of a variance, 1 / (1 - beta2) steps."""
    return max(round(1 / (1 - float(group["betas"][1]))) for group in param_groups)


def _positive(*looks: Look) -> bool:
    return all(0 < value < math.inf for look in looks for value in (look.variance, look.trust_ratio))


def _within(ratio: float, bound: float) -> bool:
    return 1 / bound <= ratio <= bound
