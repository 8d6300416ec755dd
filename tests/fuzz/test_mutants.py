"""The fuzzing would find a wrong formula: models with one each do not pass for the optimizer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ..model import Array, Model
from ..ranks import RankPool
from .judge import Judge, MismatchError
from .plans import WORLD, Add, Consolidate, Group, Move, Plan, Resume, Rewarm, Step, Tensor
from .run import run_plans

UNUSUAL: dict[str, Any] = {
    "lr": 0.02, "betas": (0.7, 0.95), "eps": 1e-3, "weight_decay": 0.2, "min_coeff": 0.05, "max_coeff": 0.6,
    "coeff_beta": 0.6, "factor_min": 0.7, "factor_max": 1.2, "factor_threshold": 0.15,
}  # fmt: skip
GROUPS = (
    Group((Tensor((30, 7)), Tensor((9,), zero=True), Tensor((70,), dead=0.3)), UNUSUAL),
    Group((Tensor((20, 11), transposed=True), Tensor((20, 11))), {"lr": 0.01, "weight_decay": 0.0}, 0.2),
    Group((Tensor((33,)),), {"factor_min": 2.0, "factor_max": 3.0}),  # farther than the threshold lets it go at once
)
BAD = Step(bad=(1, 7, np.nan))
PLANS = [
    Plan(
        GROUPS,
        {
            "freeze_step": 3, "block_elements": 64, "bucket_elements": 512, "backend": "torch", "max_grad_norm": norm,
            "bias_correction": correct, "coeff_bias_correction": not correct, "maximize": correct,
            "scale": "l1" if correct else "rms",
        },
        (
            Step(), BAD, Step(missing=((1, 2), (0, 3))), Step(lr=0.03), Step(), Step(size=0.2), BAD, Step(), Resume(),
            Step(), Consolidate(), Step(), Move(2, 128), Step(), Step(), Rewarm(2), Step(), Add(GROUPS[0]), Step(),
            Step(), Step(), Move(1), Step(), Move(WORLD), Step(), Step(),
        ),
        ranks=3,
        seed=int(correct),
    )
    for norm, correct in ((0.3, False), (None, True), (1.5, True))
]  # fmt: skip


class BetasSwapped(Model):
    def set_groups(self, groups: Any) -> None:
        super().set_groups(groups)
        self.h["beta1"], self.h["beta2"] = self.h["beta2"], self.h["beta1"]


class NoWeightDecay(Model):
    def set_groups(self, groups: Any) -> None:
        super().set_groups([group | {"weight_decay": 0.0} for group in groups])


class RateOfTheFirstGroup(Model):
    def set_groups(self, groups: Any) -> None:
        super().set_groups([group | {"lr": groups[0]["lr"]} for group in groups])


class EpsInsideTheRoot(Model):
    def denominator(self, v: Array) -> Array:
        return np.sqrt((v / self.of(self.corrections[1]) if self.correcting else v) + self.each("eps") ** 2)


class NormBeforeTheClamp(Model):
    """A clamp that is not there when a norm is 0 decides there too."""

    def trust_ratio(self, p_norm: Array, u_norm: Array) -> Array:
        c = np.where((p_norm == 0) | (u_norm == 0), 1.0, p_norm / u_norm)
        return np.clip(c, self.h["min_coeff"], self.h["max_coeff"])


class ThresholdBeforeTheClamp(Model):
    def set_groups(self, groups: Any) -> None:
        super().set_groups(groups)
        self.bounds = self.h["factor_min"], self.h["factor_max"]
        self.h["factor_min"], self.h["factor_max"] = np.zeros_like(self.bounds[0]), np.full_like(self.bounds[0], np.inf)

    def threshold(self, f: Array) -> Array:
        return np.clip(super().threshold(f), *self.bounds)


class NoThreshold(Model):
    def threshold(self, f: Array) -> Array:
        return f


class MaskedAreCounted(Model):
    def scale(self, x: Array, where: Array) -> Array:
        return np.sqrt(np.bincount(where, x * x) / np.bincount(where))[where]


class OneScaleForServers(Model):
    """A scale for the bucket instead of one for each chunk."""

    def lay_out(self, place: tuple[Array, Array], ranks: int) -> None:
        super().lay_out((place[0], place[0]), ranks)


class MeanInsteadOfRoot(Model):
    def scale(self, x: Array, where: Array) -> Array:
        return (np.bincount(where, np.abs(x)) / np.maximum(np.bincount(where, self.part), 1))[where]


class NoFeedback(Model):
    """The workers' errors are kept, and never used."""

    def compensated(self, local: Array) -> tuple[Array, Array]:
        x, size = super().compensated(local)
        return np.where(self.part, x - self.e, 0.0), size


class NoFeedbackOfServers(Model):
    def serve(self, q: Array) -> Array:
        return q.mean(0)


class SumInsteadOfMean(Model):
    def serve(self, q: Array) -> Array:
        return q.sum(0) + self.E


class ErrorsOutsideTheScaling(Model):
    """x = (b1 m + (1-b1) g + e) s."""

    def compensated(self, local: Array) -> tuple[Array, Array]:
        x, size = super().compensated(local)
        return np.where(self.part, x + self.e * (self.of(self.s) - 1), 0.0), size


class VarianceIsNotFrozen(Model):
    """The direction is that of v'."""

    def directions(self, part: Array) -> tuple[Array, Array, Array]:
        v, self.v = self.v, self.v_fresh if self.stage == "compression" else self.v
        found = super().directions(part)
        self.v = v
        return found


class ClipsByRanks(Model):
    """rho, by which local norms are larger than that of the mean, is left out."""

    def clip(self, local: Array) -> float:
        rho, self.rho = self.rho, np.zeros(2)
        found = super().clip(local)
        self.rho = rho
        return found


class ForgetsNothing(Model):
    @staticmethod
    def remember(rho: Array, new: Array) -> Array:
        return rho + new


class SkipsCount(Model):
    def step(self, gradients: Array) -> None:
        self.counted += not np.isfinite(gradients).all()
        super().step(gradients)


class MissingIsNotZero(Model):
    """An average over the ranks that have a gradient."""

    def _warmup_step(self, local: Array, ends: bool) -> None:
        there = np.stack([np.bincount(self.tensor, row != 0, len(self.sizes)) > 0 for row in local])
        super()._warmup_step(local * self.ranks / np.maximum(there.sum(0), 1)[self.tensor], ends)


class ErrorsAreDropped(Model):
    """At another number of ranks, and when warming up again."""

    def mean_error(self) -> Array:
        return np.zeros_like(self.E)


class WorkersErrorsOnly(Model):
    def mean_error(self) -> Array:
        return self.e.mean(0)


class SixthDigit(Model):
    """A hyperparameter is wrong in the sixth digit."""

    def set_groups(self, groups: Any) -> None:
        super().set_groups([group | {"coeff_beta": group["coeff_beta"] * (1 + 3e-6)} for group in groups])


MUTANTS = Model.__subclasses__()


@pytest.fixture(scope="module")
def seen(ranks: RankPool) -> list[list[Any]]:
    found = ranks(WORLD, run_plans, PLANS)
    return [[one[number] for one in found] for number in range(len(PLANS))]


def test_the_model_passes(seen: list[list[Any]]) -> None:
    for plan, one in zip(PLANS, seen, strict=True):
        judge = Judge(plan)
        judge.judge(one)
        assert 0.001 < max(judge.worst.values()) < 1.0


@pytest.mark.parametrize("kind", MUTANTS, ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_wrong_formula_is_found(seen: list[list[Any]], kind: type[Model]) -> None:
    def passes(plan: Plan, one: list[Any]) -> bool:
        try:
            Judge(plan, kind).judge(one)
        except MismatchError:
            return False
        return True

    assert not all(passes(plan, one) for plan, one in zip(PLANS, seen, strict=True))


def test_a_flipped_bit_is_found(seen: list[list[Any]]) -> None:
    """What the model does not compute anew must stay as it is, to the last bit, on every rank."""
    for key in ("exp_avg_sq", "lamb_coeff", "scaling_coeff", "p"):
        one = [[None if look is None else dict(look) for look in rank] for rank in seen[0]]
        at = PLANS[0].operations.index(Consolidate()) + 1
        for rank in one[:3]:
            rank[at][key] = np.nextafter(rank[at][key], np.inf, dtype=rank[at][key].dtype)
        with pytest.raises(MismatchError, match=f"Consolidate.*{key}"):
            Judge(PLANS[0]).judge(one)
