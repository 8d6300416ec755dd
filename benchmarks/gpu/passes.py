"""Every pass of real steps, run by kernel and twin on equal inputs, held together and against the formulas in fp64."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from onebit_triton.kernels.backends import load_passes
from onebit_triton.kernels.planes_reference import check_sum, header
from onebit_triton.kernels.tables import Decision, Header, TensorTable

from .formulas import ELEMENTWISE, FORMULAS, signs
from .loopback import one_rank_of, wrapped_passes
from .part import Part
from .tensors import AWKWARD, TINY, Guarded, two_groups

ROUNDED = ("partials", "clip", "rates", "x_scale", "y_scale")
"""Arguments that hold sums or follow from them; of messages, two floats of the header. All else agrees bit for bit."""

MESSAGES = ("new_messages", "message")
"""Arguments whose signs a formula gives."""

TWIN_RTOL = 5e-6
"""Relative difference that another order of summation may cause."""

FORMULA_RTOL, FORMULA_ATOL = 2e-5, 2e-6
"""Some roundings of fp32: of the value, and of the largest value of a tensor."""


@dataclass
class Tally:
    """What the comparisons of one pass have shown."""

    calls: int = 0
    twin: float = 0.0
    formula: float = 0.0
    failures: list[str] = field(default_factory=list)

    def expect(self, holds: bool, failure: str) -> None:
        """Note a failure unless something holds."""
        if not holds:
            self.failures.append(failure)

    def __str__(self) -> str:
        shown = f"{self.calls} calls, sums within {self.twin:.1e} of the twin, all within {self.formula:.1e} of fp64"
        return f"{shown}; {len(self.failures)} failed, first: {self.failures[0]}" if self.failures else shown


class CheckedPasses:
    """Passes that run on the real tensors by the kernel and on copies by the twin, and compare what both leave."""

    def __init__(self, device: torch.device) -> None:
        self._twins = load_passes("torch", device)
        self.tallies: dict[str, Tally] = {}
        self.passes = wrapped_passes(device, lambda name, kernel: partial(self._run, name, kernel))

    def _run(self, name: str, kernel: Callable[..., None], *args: Any) -> None:
        tally = self.tallies.setdefault(name, Tally())
        tally.calls += 1
        twin = getattr(self._twins, name)
        signature = inspect.signature(twin)

        def bound(values: tuple[Any, ...]) -> SimpleNamespace:
            return SimpleNamespace(**signature.bind(*values).arguments)

        before, other = bound(copy.deepcopy(args)), copy.deepcopy(args)
        kernel(*args)
        twin(*other)
        after, other_after = bound(args), bound(other)
        for argument in vars(after):
            found, expected = _value(after, argument), _value(other_after, argument)
            if isinstance(found, Tensor):
                self._compare_twin(tally, argument, found, expected)
        if name in FORMULAS and (_skipped(before) == (name == "undo_momentum")):
            for argument, expected in FORMULAS[name](before).items():
                self._compare_formula(tally, argument, before, after, expected)

    def _compare_twin(self, tally: Tally, argument: str, found: Tensor, expected: Tensor) -> None:
        if found.dtype == torch.uint8 and "message" in argument:
            found, expected = found.view(-1, found.shape[-1]).clone(), expected.view(-1, expected.shape[-1]).clone()
            intact = torch.equal(check_sum(found) == 0, check_sum(expected) == 0)
            tally.expect(intact, f"{argument} does not pass its check, or should not")
            for number in (Header.SCALE, Header.SQUARES, Header.CHECK):
                if number != Header.CHECK:  # which is of rounded words
                    mine, twins = header(found, number), header(expected, number)
                    self._compare_rounded(tally, f"{argument}'s header", mine, twins)
                header(found, number).copy_(header(expected, number))
        if argument in ROUNDED:
            self._compare_rounded(tally, argument, found, expected)
        else:
            tally.expect(same_bits(found, expected), f"{argument} differs: {_first_difference(found, expected)}")

    def _compare_rounded(self, tally: Tally, argument: str, found: Tensor, expected: Tensor) -> None:
        difference = relative_difference(found.double(), expected.double(), 0.0)
        tally.twin = max(tally.twin, difference)
        tally.expect(difference <= TWIN_RTOL, f"{argument} is off by {difference:.2e} of its value")

    def _compare_formula(self, tally: Tally, argument: str, before: Any, after: Any, expected: Tensor) -> None:
        found, rtol = _value(after, argument), FORMULA_RTOL
        if found.dtype == torch.uint8:
            found = signs(found, expected.shape[-1]) * expected.abs()
        atol = 0.0
        if argument in MESSAGES:
            atol = FORMULA_ATOL * float(expected.abs().max())
        elif argument in ELEMENTWISE:
            largest = max(float(value.abs().max()) for value in (expected, _value(before, argument)))
            atol = FORMULA_ATOL * largest
        stored = getattr(after, argument).dtype
        if stored in (torch.bfloat16, torch.float16):
            rtol += torch.finfo(stored).eps / 2
            atol += torch.finfo(stored).smallest_normal * torch.finfo(stored).eps
        excess = relative_difference(found.double().view(expected.shape), expected, atol)
        tally.formula = max(tally.formula, excess)
        tally.expect(excess <= rtol, f"{argument} is off by {excess:.2e} of the formula's value")


def _value(bound: Any, argument: str) -> Any:
    """An argument's content: of a table of tensors, the tensors as fp32 [blocks, block_elements]."""
    value = getattr(bound, argument)
    return value.gather(bound.blocks) if isinstance(value, TensorTable) else value


def _skipped(before: Any) -> bool:
    """Whether the pass is told to skip; the deciding passes are told nothing yet."""
    decision = getattr(before, "decision", None)
    deciding = hasattr(before, "track_rho") or hasattr(before, "headers")
    return decision is not None and not deciding and bool(decision[Decision.SKIP])


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bits, all NaN counting as one."""
    if a.dtype.is_floating_point:
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
        return bool(((a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())).all())
    return torch.equal(a, b)


def relative_difference(found: Tensor, expected: Tensor, atol: float) -> float:
    """Largest |found - expected| beyond atol, over |expected|; where a value is not finite, both must be so."""
    finite = expected.isfinite() & (expected.abs() < torch.finfo(torch.float32).max)
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    excess = torch.where(finite, (found - expected).abs() - atol, 0.0).clamp(min=0)
    return float(torch.where(excess > 0, excess / expected.abs(), 0.0).max())


def _first_difference(a: Tensor, b: Tensor) -> str:
    differ = (a != b).flatten().nonzero().flatten()
    if differ.numel() == 0:
        return "only in the sign of zeros"
    at = int(differ[0])
    return f"{differ.numel()} of {a.numel()}, at {at}: {a.flatten()[at].item()!r}, twin {b.flatten()[at].item()!r}"


@dataclass(frozen=True)
class Case:
    """A layout to check."""

    name: str
    dtype: torch.dtype
    block: int
    ranks: int
    shift: int = 0
    options: tuple[tuple[str, Any], ...] = ()


CASES = (
    Case("fp32", torch.float32, 1024, 1, options=(("bias_correction", True), ("max_grad_norm", 0.05))),
    Case("fp32-4-ranks", torch.float32, 1024, 4),
    Case("fp32-misaligned-2-ranks", torch.float32, 2048, 2, 1, (("coeff_bias_correction", False),)),
    Case("bf16-3-ranks", torch.bfloat16, 64, 3, 1, (("max_grad_norm", 0.05),)),
    Case("bf16-8-ranks", torch.bfloat16, 4096, 8, options=(("bias_correction", True),)),
    Case("fp16-5-ranks", torch.float16, 1024, 5, 3, (("max_grad_norm", 0.05),)),
)


def take_steps(part: Part, case: Case, checked: CheckedPasses) -> None:
    """Take steps of both stages with a case's layout, and check what they come to.

    Two steps are skipped for a gradient that is not finite; one gradient is missing now and then; some elements never
    see a gradient, or are masked.
    """
    block = 64 if part.tiny else case.block
    guarded = Guarded(TINY if part.tiny else AWKWARD, case.dtype, part.device, case.shift)
    last = guarded.params[-1]
    every_third = torch.arange(last.numel(), device=part.device).view(last.shape) % 3
    groups = [*two_groups(guarded.params[:-1]), {"params": [last], "exp_avg_mask": every_third}]
    optimizer = one_rank_of(
        case.ranks, groups, checked.passes, lr=0.01, freeze_step=3, block_elements=block,
        bucket_elements=4 * block * case.ranks, **dict(case.options),
    )  # fmt: skip
    for step in range(9):
        guarded.set_gradients(step)
        guarded.params[0].grad[:2] = 0.0
        if step in (1, 6):
            guarded.grads[1][-1] = float("nan")
        if step in (2, 7):
            guarded.params[2].grad = None
        optimizer.step()
    progress = optimizer.metrics()
    taken, skipped, stage = (progress[key] for key in ("step", "skipped_steps", "stage"))
    fits = (taken, skipped, stage) == (7, 2, "compression")
    part.check(f"{case.name}: steps", fits, f"{taken} taken, {skipped} skipped, now in {stage}")
    part.check(f"{case.name}: guards", guarded.intact(), "memory around parameters and gradients is as it was")
    finite = all(bool(param.isfinite().all()) for param in guarded.params)
    part.check(f"{case.name}: parameters", finite, "finite")


def passes(part: Part, only: str) -> None:
    """Check every pass in the steps of one case."""
    case = next(case for case in CASES if case.name == only)
    checked = CheckedPasses(part.device)
    with part.checking(f"{case.name}: steps"):
        take_steps(part, case, checked)
    for name, tally in checked.tallies.items():
        part.check(f"{case.name}: {name}", not tally.failures, str(tally))
