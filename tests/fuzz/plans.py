"""Plans: parameters, options, and what happens to an optimizer, one thing after the other; and how they are drawn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from onebit_triton.kernels.tables import flat

WORLD = 4
"""Processes there are; an optimizer uses the first few of them."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Tensor:
    """One parameter.

    Attributes:
        shape, dtype: of the parameter.
        transposed: whether its memory order is not that of its dimensions.
        zero: whether it starts as 0.
        dead: share of its elements that never get a gradient.
        frozen: whether it needs no gradient.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    transposed: bool = False
    zero: bool = False
    dead: float = 0.0
    frozen: bool = False


@dataclass(frozen=True)
class Group:
    """One param group: its parameters, what it sets for itself, and the share of elements that its mask leaves out."""

    tensors: tuple[Tensor, ...]
    options: dict[str, Any] = field(default_factory=dict)
    masked: float | None = None


@dataclass(frozen=True)
class Step:
    """A step.

    Attributes:
        size: of the gradients.
        missing: (rank, number of the tensor), modulo what there are, of gradients that are None.
        bad: (rank, number of the tensor, value) of one element.
        lr: what a scheduler makes of the first group's rate.
        everywhere: whether only the signal is there, so that gradients are equal on all ranks.
    """

    size: float = 0.1
    missing: tuple[tuple[int, int], ...] = ()
    bad: tuple[int, int, float] | None = None
    lr: float | None = None
    everywhere: bool = False


@dataclass(frozen=True)
class Resume:
    """Save, and load into a new optimizer on as many ranks; or copy it."""

    copied: bool = False


@dataclass(frozen=True)
class Move:
    """Consolidate, save, and load on another number of ranks with another layout."""

    ranks: int
    block: int = 64
    bucket: int = 512


@dataclass(frozen=True)
class Consolidate:
    """Give all workers the mean error."""


@dataclass(frozen=True)
class Rewarm:
    """Warm up once more; refused in warmup."""

    steps: int = 1


@dataclass(frozen=True)
class Add:
    """Add a param group; refused in compression."""

    group: Group


@dataclass(frozen=True)
class Plan:
    """One case: everything that happens follows from it.

    Attributes:
        groups: the first param groups.
        options: of the whole optimizer.
        operations: what happens.
        ranks: of the first optimizer.
        seed: of the numbers in parameters, gradients and masks.
        loss_scale: power of two that gradients are multiplied by; 0: there is no loss scale.
    """

    groups: tuple[Group, ...]
    options: dict[str, Any]
    operations: tuple[Any, ...]
    ranks: int = 2
    seed: int = 0
    loss_scale: float = 0.0


# Numbers of a plan: the same wherever they are asked for


def make_parameter(plan: Plan, number: int, tensor: Tensor) -> torch.nn.Parameter:
    """A parameter with its first value."""
    random = np.random.default_rng((plan.seed, number))
    value = torch.empty(tensor.shape[::-1] if tensor.transposed else tensor.shape, dtype=tensor.dtype)
    if not tensor.zero:
        value.copy_(torch.from_numpy(np.asarray(0.1 * random.standard_normal(tuple(value.shape)))))
    else:
        value.zero_()
    return torch.nn.Parameter(value.t() if tensor.transposed else value, requires_grad=not tensor.frozen)


def make_mask(plan: Plan, number: int, group: Group) -> torch.Tensor | None:
    """The mask of a group whose first tensor has this number: over elements, if all tensors have one shape."""
    if group.masked is None:
        return None
    if len({tensor.shape for tensor in group.tensors}) > 1:
        return torch.tensor(float(group.masked < 0.5))
    random = np.random.default_rng((plan.seed, number, 1))
    return torch.from_numpy(np.asarray(random.random(group.tensors[0].shape) >= group.masked))


def make_gradient(plan: Plan, at: int, rank: int, ranks: int, number: int, tensor: Tensor, step: Step) -> np.ndarray:
    """The gradient of a parameter in memory order, fp64: values that its dtype holds.

    In half precision they lie on a grid on which even their average over ranks is exact: what gloo rounds there is no
    matter of the formulas.
    """
    size = int(np.prod(tensor.shape, dtype=int))
    signal = np.random.default_rng((plan.seed, number, 2)).standard_normal(size)
    noise = np.random.default_rng((plan.seed, at, rank, number)).standard_normal(size)
    values = signal if step.everywhere else signal + noise
    values = values * (np.random.default_rng((plan.seed, number, 3)).random(size) >= tensor.dead)
    if tensor.dtype == torch.float32:
        return (values * step.size).astype(np.float32).astype(np.float64)
    grid = 2.0 ** np.round(np.log2(step.size) - 4)
    return np.clip(np.round(values * 6), -20, 20) * ranks * grid


def missing(plan: Plan, step: Step, rank: int, ranks: int, tensors: list[Tensor], number: int) -> bool:
    """Whether a rank has no gradient for a parameter."""
    gaps = {(r % ranks, t % len(tensors)) for r, t in step.missing}
    return tensors[number].frozen or (rank, number) in gaps


def make_gradients(plan: Plan, at: int, rank: int, ranks: int, tensors: list[Tensor], step: Step) -> list[Any]:
    """All gradients of a rank in memory order, without the loss scale; None where one is missing."""
    found: list[Any] = []
    for number, tensor in enumerate(tensors):
        gone = missing(plan, step, rank, ranks, tensors, number)
        found.append(None if gone else make_gradient(plan, at, rank, ranks, number, tensor, step))
    if step.bad is not None and rank == step.bad[0] % ranks:
        candidates = [gradient for gradient in found if gradient is not None and gradient.size]
        if candidates:
            gradient = candidates[step.bad[1] % len(candidates)]
            gradient[step.bad[1] % gradient.size] = step.bad[2]
    return found


def in_memory_order(value: torch.Tensor, parameter: torch.Tensor) -> np.ndarray:
    """Values of something shaped like a parameter, or that broadcasts to it, in the parameter's memory order."""
    like = torch.empty_like(parameter, dtype=torch.float64)
    like.copy_(value.expand(parameter.shape))
    return flat(like).numpy()


# How they are drawn


def _number(low: float, high: float, *special: float) -> st.SearchStrategy[float]:
    return st.one_of(st.sampled_from(special), st.floats(low, high)) if special else st.floats(low, high)


SHAPES = st.one_of(
    st.sampled_from([(), (1,), (0,), (3, 0), (64,), (65,), (8, 8), (1, 1, 5), (129,)]),
    st.tuples(st.integers(1, 200)),
    st.tuples(st.integers(1, 24), st.integers(1, 24)),
)


@st.composite
def tensors(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...] | None = None) -> Tensor:
    shape = draw(SHAPES) if shape is None else shape
    return Tensor(
        shape, draw(st.sampled_from(dtypes)), len(shape) == 2 and draw(st.booleans()), draw(st.integers(0, 9)) == 9,
        draw(st.sampled_from([0.0, 0.0, 0.0, 0.3, 1.0])), draw(st.integers(0, 14)) == 14,
    )  # fmt: skip


COEFF, FACTOR, DECAY = _number(0.01, 2.0, 0.01, 10.0), _number(0.05, 5.0, 0.5, 4.0), _number(0.01, 0.5, 0.0)
DRAWN = {
    "lr": _number(1e-4, 0.1, 0.0),
    "betas": st.tuples(_number(0.01, 0.97, 0.0, 0.9), _number(0.01, 0.999, 0.0, 0.999)),
    "eps": st.sampled_from([1e-8, 1e-6, 1e-3, 0.1]),
    "weight_decay": DECAY,
    "coeffs": st.tuples(COEFF, COEFF),
    "factors": st.tuples(FACTOR, FACTOR),
    "coeff_beta": _number(0.1, 0.99, 0.0),
    "factor_threshold": _number(0.01, 0.9, 0.0),
    "max_rate_ratio": _number(0.1, 4.0, 1.0),
}
"""What a group may set for itself; coeffs and factors are a lower and an upper bound."""


@st.composite
def hyperparameters(draw: st.DrawFn) -> dict[str, Any]:
    """Some of them; the others are left to the optimizer."""
    drawn = {name: draw(DRAWN[name]) for name in draw(st.lists(st.sampled_from(sorted(DRAWN)), unique=True))}
    for key, low, high in (("coeffs", "min_coeff", "max_coeff"), ("factors", "factor_min", "factor_max")):
        if key in drawn:
            drawn[low], drawn[high] = sorted(drawn.pop(key))
    return drawn


@st.composite
def param_groups(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...], most: int = 4) -> Group:
    masked = draw(st.sampled_from([None, None, None, 0.0, 0.2, 1.0]))
    shape = None if masked is None else draw(SHAPES)
    count = st.integers(1, most)
    return Group(
        tuple(draw(tensors(dtypes, shape)) for _ in range(draw(count))), draw(hyperparameters()), masked,
    )  # fmt: skip


BAD = st.tuples(st.integers(0, 3), st.integers(0, 50), st.sampled_from([np.nan, np.inf, -np.inf, 3e30]))
GAPS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=3).map(tuple)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """A step, an ordinary one more often than not."""

    def one_in(number: int) -> bool:
        return draw(st.integers(1, number)) == number

    return Step(
        draw(st.sampled_from([0.1, 1e-3, 3.0])),
        draw(GAPS) if one_in(5) else (),
        draw(BAD) if one_in(6) else None,
        draw(st.sampled_from([0.0, 0.05])) if one_in(8) else None,
        one_in(10),
    )


@st.composite
def operations(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...]) -> Any:
    """Something that happens: a step in three of four cases."""
    match draw(st.sampled_from(["step"] * 15 + ["resume", "move", "move", "consolidate", "rewarm", "add"])):
        case "resume":
            return Resume(draw(st.booleans()))
        case "move":
            blocks, buckets = st.sampled_from([64, 128, 256]), st.sampled_from([256, 512, 4096])
            return Move(draw(st.integers(1, WORLD)), draw(blocks), draw(buckets))
        case "consolidate":
            return Consolidate()
        case "rewarm":
            return Rewarm(draw(st.integers(1, 3)))
        case "add":
            return Add(draw(param_groups(dtypes, 2)))
        case _:
            return draw(steps())


@st.composite
def plans(draw: st.DrawFn, backend: str = "torch", most_ranks: int = WORLD, most_steps: int = 16) -> Plan:
    """A plan of any kind; a huge tensor with many tiny ones now and then."""
    dtypes = draw(st.sampled_from([DTYPES[:1], DTYPES[:1], DTYPES[1:2], DTYPES[2:], DTYPES]))
    groups = draw(st.lists(param_groups(dtypes), min_size=1, max_size=3))
    if draw(st.integers(0, 9)) == 9:
        groups.append(Group((Tensor((3001,)), *[Tensor((draw(st.integers(1, 4)),)) for _ in range(8)])))
    block = draw(st.sampled_from([64, 64, 128, 256]))
    options = {
        **draw(hyperparameters()),
        "freeze_step": draw(st.integers(1, 3)), "block_elements": block,
        "bucket_elements": draw(st.sampled_from([block, 512, 4096])), "backend": backend,
        "max_grad_norm": draw(st.sampled_from([None, None, 0.05, 1.0, 100.0])),
        "bias_correction": draw(st.booleans()), "coeff_bias_correction": draw(st.booleans()),
        "maximize": draw(st.booleans()), "scale": draw(st.sampled_from(["rms", "l1"])),
    }  # fmt: skip
    scale = draw(st.sampled_from([0.0, 64.0] if torch.float16 in dtypes else [0.0, 0.0, 0.0, 4096.0]))
    sequence = draw(st.lists(operations(dtypes), min_size=5, max_size=most_steps))
    ranks = draw(st.sampled_from([*range(2, most_ranks + 1), 1]))
    return Plan(tuple(groups), options, tuple(sequence), ranks, draw(st.integers(0, 2**16)), scale)
