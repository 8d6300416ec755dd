"""Whether what ranks saw is what the model says."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..model import Array, Model, places
from .plans import Add, Consolidate, Group, Move, Plan, Rewarm, Step, in_memory_order, make_gradients, make_mask
from .plans import make_parameter as make
from .run import Seen

RTOL = 1e-6
"""Of the size of what was added up: a few dozen roundings in fp32."""

STATES = {
    "p": "p", "exp_avg": "m", "exp_avg_sq": "v", "exp_avg_sq_fresh": "v_fresh", "worker_error": "e",
    "server_error": "E", "lamb_coeff": "C", "lamb_coeff_correction": "C_correction", "bias_correction": "corrections",
    "scaling_coeff": "s", "last_factor": "f", "rho": "rho", "step": "taken",
}  # fmt: skip
"""What is saved -> attribute of the model."""

COUNTS = {
    "stage": "stage", "calls": "calls", "counted": "counted", "skipped": "skipped", "streak": "streak",
    "warmup_base": "base", "warmup_steps": "steps",
}  # fmt: skip
"""Progress that is saved -> attribute of the model."""


class MismatchError(AssertionError):
    """The optimizer does not hold what it must."""


class Judge:
    """Follows one plan with the model.

    The model goes on from what was seen, so that a doubtful sign in one step cannot part the two in the next. What the
    model does not compute anew in an operation must not have changed by a bit.

    Args:
        plan: what was run.
        kind: class of the model.

    Attributes:
        worst: largest deviation of every state, in units of what is allowed.
    """

    def __init__(self, plan: Plan, kind: type[Model] = Model) -> None:
        self.plan, self.kind = plan, kind
        self.worst: dict[str, float] = {}

    def judge(self, ranks: list[list[Seen | None] | str]) -> None:
        """Go through everything that all ranks saw.

        Raises:
            MismatchError: naming the operation, the state, and the first element that differs.
        """
        failed = [f"rank {rank}:\n{found}" for rank, found in enumerate(ranks) if isinstance(found, str)]
        if failed:
            raise MismatchError("\n".join(failed))
        moments = [[seen for seen in moment if seen is not None] for moment in zip(*ranks, strict=True)]
        self._start(self._together(moments[0], "at the start"))
        for at, (operation, seen) in enumerate(zip(self.plan.operations, moments[1:], strict=True)):
            self.where = f"operation {at}, {operation}"
            self.seen = self._together(seen, self.where)
            self._follow(at, operation)
            self._compare()

    def _together(self, moment: list[Seen], where: str) -> dict[str, Any]:
        """What all ranks saw as one: errors of all, and what replicas must have in common."""
        first = moment[0]
        for rank, seen in enumerate(moment):
            if not seen["rounded"]:
                raise MismatchError(f"{where}: parameters of rank {rank} are not their masters, rounded")
            for key in STATES.keys() & seen.keys() - {"worker_error", "server_error"}:
                if not np.array_equal(seen[key], first[key]):
                    raise MismatchError(f"{where}: {key} of rank {rank} is not that of rank 0")
            differ = {key for key in seen["progress"] if seen["progress"][key] != first["progress"][key]}
            differ -= {"rank", "tensors"}  # which are of the errors of each rank
            if differ:
                raise MismatchError(f"{where}: ranks differ in {differ}")
        together = {key: np.asarray(first[key], np.float64) for key in STATES.keys() & first.keys()}
        together["bias_correction"] = np.stack([first["bias_correction1"], first["bias_correction2"]])
        together["rho"] = np.array([first["progress"]["rho"], first["progress"]["rho_weight"]])
        together["progress"] = first["progress"] | {"stage": first["stage"]}
        together["worker_error"] = np.zeros((len(moment), first["p"].size))
        together["server_error"] = np.zeros(first["p"].size)
        if first["stage"] == "compression" and len(moment) > 1:
            together["worker_error"] = np.stack([seen["worker_error"] for seen in moment]).astype(np.float64)
            if "server_error" in first:
                together["server_error"] = self._whole(moment)
        return together

    @staticmethod
    def _whole(moment: list[Seen]) -> Array:
        """Errors of the servers: every rank has its part of every tensor."""
        parts = [np.split(seen["server_error"], np.cumsum(seen["server_sizes"])[:-1]) for seen in moment]
        return np.concatenate([np.concatenate(column) for column in zip(*parts, strict=True)]).astype(np.float64)

    # The same operations

    @property
    def tensors(self) -> list[Any]:
        return [tensor for group in self.groups for tensor in group.tensors]

    def _place(self) -> tuple[Array, Array]:
        return places(self.params, self.block, self.bucket, self.ranks)

    def _settings(self) -> list[dict[str, Any]]:
        """Hyperparameters of every tensor that is not empty; a frozen one does not move."""
        defaults = {
            "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "max_coeff": 10.0, "min_coeff": 0.01,
            "coeff_beta": 0.9, "factor_max": 4.0, "factor_min": 0.5, "factor_threshold": 0.1,
            "max_rate_ratio": np.inf,
        }  # fmt: skip
        given = {key: value for key, value in self.plan.options.items() if key in defaults}
        found = []
        for number, group in enumerate(self.groups):
            settings = defaults | given | group.options
            if number == 0 and self.lr is not None:
                settings["lr"] = self.lr
            found += [
                settings | ({"lr": 0.0} if tensor.frozen else {}) for tensor in group.tensors if 0 not in tensor.shape
            ]
        return found

    def _take_in(self, group: Group) -> tuple[list[int], Array, Array]:
        """Make the parameters of one more group. Returns sizes, values and mask of what is not empty."""
        first = len(self.params)
        self.groups.append(group)
        mine = [make(self.plan, number, tensor) for number, tensor in enumerate(group.tensors, first)]
        self.params += mine
        mask = make_mask(self.plan, first, group)
        full = [p for p in mine if p.numel()]
        nothing = np.zeros(0)
        values = np.concatenate([nothing, *(in_memory_order(p.detach(), p) for p in full)])
        masks = [in_memory_order(mask, p) if mask is not None else np.ones(p.numel()) for p in full]
        return [p.numel() for p in full], values, np.concatenate([nothing, *masks]) != 0

    def _start(self, seen: dict[str, Any]) -> None:
        options = self.plan.options
        self.groups: list[Group] = []
        self.params: list[Any] = []
        self.lr: float | None = None
        self.ranks = self.plan.ranks
        self.block, self.bucket = options["block_elements"], options["bucket_elements"]
        taken = [self._take_in(group) for group in self.plan.groups]
        names = ("freeze_step", "bias_correction", "coeff_bias_correction", "maximize", "max_grad_norm", "scale")
        self.model = self.kind(
            [size for one in taken for size in one[0]], self._settings(), self._place(), self.ranks,
            np.concatenate([one[1] for one in taken]), np.concatenate([one[2] for one in taken]),
            settle=self._settle, **{name: options[name] for name in names},
        )  # fmt: skip
        self.where, self.seen = "at the start", seen
        self._compare()

    def _follow(self, at: int, operation: Any) -> None:
        match operation:
            case Step():
                self._step(at, operation)
            case Move():
                self.ranks = operation.ranks
                self.block, self.bucket = operation.block, max(operation.block, operation.bucket)
                self.model.move(self._place(), self.ranks)
            case Consolidate():
                self.model.consolidate()
            case Rewarm() if self.model.stage == "compression":
                self.model.rewarm(operation.steps)
            case Add() if self.model.stage == "warmup":
                sizes, values, mask = self._take_in(operation.group)
                self.model.add_tensors(sizes, self._settings(), self._place(), values, mask)

    def _step(self, at: int, step: Step) -> None:
        if step.lr is not None:
            self.lr = step.lr
            self.model.set_groups(self._settings())
        rows = []
        for rank in range(self.ranks):
            found = make_gradients(self.plan, at, rank, self.ranks, self.tensors, step)
            pairs = zip(self.params, found, strict=True)
            rows.append(np.concatenate([np.zeros(0), *(np.zeros(p.numel()) if g is None else g for p, g in pairs)]))
        self.model.step(np.stack(rows))

    # The comparison

    def _settle(self, name: str, value: Array, size: Any, where: Any = True, other: Array | None = None) -> Array:
        """What was seen, once it is found to be what the model says."""
        seen = self.seen[name]
        if other is not None:
            doubtful = np.abs(value + other) / 2 <= RTOL * size
            value = np.where(doubtful & (np.abs(other - seen) < np.abs(value - seen)), other, value)
        allowed = RTOL * (np.abs(value) + size)
        self._check(name, np.where(where, seen, value), value, allowed)
        return np.where(where, seen, value)

    def _compare(self) -> None:
        """Everything, now that the model has seen what it computed: the rest has not moved."""
        for name, attribute in STATES.items():
            if name in self.seen and not (name == "exp_avg_sq_fresh" and self.model.stage == "warmup"):
                self._check(name, self.seen[name], getattr(self.model, attribute), 0.0)
        for name, attribute in COUNTS.items():
            if self.seen["progress"][name] != getattr(self.model, attribute):
                raise MismatchError(
                    f"{self.where}: {name} must be {getattr(self.model, attribute)}, is {self.seen['progress'][name]}"
                )

    def _check(self, name: str, seen: Array, value: Array, allowed: Any) -> None:
        if seen.shape != value.shape:
            raise MismatchError(f"{self.where}: {name} must have shape {value.shape}, has {seen.shape}")
        off = np.abs(seen - value)
        allowed = np.broadcast_to(allowed, off.shape)
        good = off <= allowed
        if not good.all():
            place = tuple(int(i) for i in np.argwhere(~good)[0])
            raise MismatchError(
                f"{self.where}: {name} at {place} must be {float(value[place])!r}, is {float(seen[place])!r}; "
                f"{int((~good).sum())} of {good.size} differ, allowed there {allowed[place]:.3g}"
            )
        share = np.where(allowed > 0, off / np.where(allowed > 0, allowed, 1.0), 0.0)
        self.worst[name] = max(self.worst.get(name, 0.0), float(share.max(initial=0.0)))
