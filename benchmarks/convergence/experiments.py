"""Which trainings make up an experiment."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .methods import METHODS
from .train import RANKS, Run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class TaskSettings:
    """Of one task, from a file like settings.toml, which says what they are."""

    steps: int
    ramp: int
    rates: Sequence[float]


@dataclass(frozen=True)
class Settings:
    """Of all trainings, from a file like settings.toml."""

    seeds: Sequence[int]
    tuning_seeds: Sequence[int]
    tasks: dict[str, TaskSettings]
    backend: str = "inductor"
    looks: int = 10

    @classmethod
    def read(cls, path: Path) -> Settings:
        """Read them from TOML."""
        found = tomllib.loads(path.read_text())
        return cls(**found | {"tasks": {name: TaskSettings(**task) for name, task in found["tasks"].items()}})


SHARES = (20, 12, 6, 3)
"""Freeze steps: one of so many steps."""


def run_of(settings: Settings, task: str, method: str, lr: float, seed: int, ranks: int = RANKS, **options: Any) -> Run:
    """One training of a task."""
    own = settings.tasks[task]
    return Run(task, method, own.steps, own.ramp, lr, seed, ranks, options, settings.backend, settings.looks)


def tuning(settings: Settings, task: str) -> list[Run]:
    """LAMB at every rate."""
    return [
        run_of(settings, task, "lamb", lr, seed) for lr in settings.tasks[task].rates for seed in settings.tuning_seeds
    ]


def best_rate(settings: Settings, task: str, score: Callable[[Run], float]) -> float:
    """The rate with the best mean score over the tuning seeds, lower being better; or the only one."""
    rates = settings.tasks[task].rates
    if len(rates) == 1:
        return rates[0]

    def total(lr: float) -> float:
        return sum(score(run) for run in tuning(settings, task) if run.lr == lr)

    return min(rates, key=total)


def settled(steps: int) -> dict[str, Any]:
    """Options of a warmup that ends by itself, after so many steps at the latest, with gradients in 8 bits."""
    return {"freeze_step": "auto", "max_freeze_step": steps, "gradient_dtype": "float8_e4m3fn"}


def comparison(settings: Settings, task: str, lr: float) -> list[Run]:
    """All methods with one rate and every seed.

    1-bit LAMB is frozen at a sixth of the steps; at a third; and when it has settled, at a third at the latest, with
    gradients in 8 bits until then.
    """
    steps = settings.tasks[task].steps
    sixth = {"freeze_step": steps // 6}
    variants = {
        "onebit": [sixth, {"freeze_step": steps // 3}, settled(steps // 3)], "onebit-deepspeed": [sixth]
    }  # fmt: skip
    return [
        run_of(settings, task, method, lr, seed, **options)
        for seed in settings.seeds
        for method in METHODS
        for options in variants.get(method, [{}])
    ]


def band(settings: Settings, task: str, lr: float) -> list[Run]:
    """LAMB and 1-bit LAMB, frozen at half of the steps: such a training is short, and still learns fast then."""
    half = settings.tasks[task].steps // 2
    return [
        run_of(settings, task, method, lr, seed, **options)
        for seed in settings.seeds
        for method, options in (("lamb", {}), ("onebit", {"freeze_step": half}))
    ]


BOUNDED = {"factor_min": 1.0, "factor_max": 1.0, "max_rate_ratio": 3.0}
"""Options that hold layer rates near LAMB's, where the paper's factors drive them up."""


def traffic(settings: Settings, task: str, lr: float) -> list[Run]:
    """LAMB, and 1-bit LAMB frozen when it has settled, at a sixth of the steps at the latest; rates bounded or not."""
    options = settled(settings.tasks[task].steps // 6)
    methods = [("lamb", {}), ("onebit", options), ("onebit", options | BOUNDED)]
    return [
        run_of(settings, task, method, lr, seed, **options) for seed in settings.seeds for method, options in methods
    ]


def freezing(settings: Settings, task: str, lr: float) -> list[Run]:
    """LAMB, and 1-bit LAMB with every freeze step of `SHARES`, its layer rates bounded or not; three seeds."""
    steps = settings.tasks[task].steps
    frozen = [{"freeze_step": steps // share, **bound} for share in SHARES for bound in ({}, {"max_rate_ratio": 2.0})]
    return [
        run_of(settings, task, method, lr, seed, **options)
        for seed in settings.seeds[:3]
        for method, options in (("lamb", {}), *(("onebit", options) for options in frozen))
    ]


def robustness(settings: Settings, task: str) -> list[Run]:
    """LAMB and 1-bit LAMB over learning rates far too high, freeze steps and numbers of ranks; one seed."""
    own = settings.tasks[task]
    highest = max(own.rates)
    rates = [highest * factor for factor in (0.25, 1, 4, 16)]
    seed = settings.seeds[0]
    return [run_of(settings, task, "lamb", lr, seed) for lr in rates] + [
        run_of(settings, task, "onebit", lr, seed, ranks, freeze_step=own.steps // share)
        for lr in rates
        for share in SHARES
        for ranks in (2, 4, 8)
    ]
