"""Ways to spoil a state dict: what bad disks, other programs and hands make of one."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from onebit_triton.checkpoint import KEY

VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 2**31, 2**40, -(2**70), 10**400, 0.5, -0.5, 1e300, float("nan"), float("inf"), "warmup",
    "7", "", b"x", [], [1], (), (0.9,), (0.5, 0.5, 0.5), {}, {"version": 1}, torch.tensor(2.0), torch.tensor(2),
    torch.tensor(float("nan")), torch.zeros(3), torch.zeros(0), torch.tensor(1j), torch.zeros(3, device="meta"),
    torch.zeros(3).to_sparse(), object,
)  # fmt: skip
"""What takes the place of something else."""


def shrink(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1)[:-1]


def poison(number: float) -> Any:
    def put(value: torch.Tensor) -> torch.Tensor:
        value = value.clone()
        value.view(-1)[-1:] = number
        return value

    return put


TENSORS = {
    "shorter": shrink,
    "flat": lambda value: value.reshape(-1),
    "one dimension more": lambda value: value.unsqueeze(0),
    "transposed": lambda value: value.t() if value.ndim == 2 else value,
    "in fp64": lambda value: value.double(),
    "in bf16": lambda value: value.bfloat16(),
    "integers": lambda value: value.to(torch.int64),
    "complex": lambda value: value.to(torch.complex64),
    "booleans": lambda value: value != 0,
    "without data": lambda value: value.to("meta"),
    "sparse": lambda value: value.to_sparse() if value.ndim else value,
    "with NaN": poison(float("nan")),
    "with inf": poison(float("inf")),
    "negative": lambda value: -value - 1,
    "zero": torch.zeros_like,
    "huge": lambda value: value.double() + 1e300,
    "a list": lambda value: value.tolist(),
    "a number": lambda value: float(value.sum()),
}
"""What becomes of a tensor."""


@dataclass(frozen=True)
class Mutation:
    """One change to a state dict.

    Attributes:
        kind: "drop", "rename", "replace", "swap", "add", "cut", "repeat", or a key of TENSORS.
        at: which of the places there are for it, modulo their number.
        other: which other place, or which of VALUES, likewise.
    """

    kind: str
    at: int
    other: int = 0

    def apply(self, state: Any) -> None:
        """Change a state dict in place; nothing if there is no such place any more."""
        places = list(_places(state))
        if self.kind in TENSORS:
            places = [place for place in places if _still_plain(place[0][place[1]])]
        if self.kind in ("cut", "repeat"):
            places = [place for place in places if isinstance(place[0][place[1]], list)]
        if not places:
            return
        inside, key = places[self.at % len(places)]
        if self.kind in TENSORS:
            inside[key] = TENSORS[self.kind](inside[key])
        elif self.kind == "drop":
            del inside[key]
        elif self.kind == "rename":
            if isinstance(inside, dict):
                inside[f"{key}_"] = inside.pop(key)
        elif self.kind == "replace":
            inside[key] = copy.deepcopy(VALUES[self.other % len(VALUES)])
        elif self.kind == "swap":
            # With something of its like, if there is any: that is what would pass unnoticed.
            alike = [place for place in places if type(place[0][place[1]]) is type(inside[key])]
            there, name = alike[self.other % len(alike)]
            inside[key], there[name] = there[name], inside[key]
        elif self.kind == "add":
            if isinstance(inside, dict):
                inside["something else"] = copy.deepcopy(VALUES[self.other % len(VALUES)])
        elif self.kind == "cut":
            inside[key] = inside[key][:-1]
        elif self.kind == "repeat":
            inside[key] = [*inside[key], *inside[key][:1]]


def _still_plain(value: Any) -> bool:
    """Whether every function of TENSORS takes it, which those that others have changed are not."""
    plain = isinstance(value, torch.Tensor) and value.is_floating_point() and value.layout is torch.strided
    return plain and value.device.type != "meta"


def _places(state: Any) -> Any:
    """(container, key) of everything in a state dict, the outermost first."""
    if isinstance(state, dict):
        items = [(state, key) for key in state]
    elif isinstance(state, list):
        items = [(state, index) for index in range(len(state))]
    else:
        return
    yield from items
    for inside, key in items:
        yield from _places(inside[key])


KINDS = ["drop", "rename", "add", "cut", "repeat", *TENSORS, *["replace", "swap"] * 6]


def mutations() -> st.SearchStrategy[list[Mutation]]:
    """One to three of them."""
    one = st.builds(Mutation, st.sampled_from(KINDS), st.integers(0, 400), st.integers(0, 400))
    return st.lists(one, min_size=1, max_size=3)


def mutate(state: dict[str, Any], changes: list[Mutation]) -> dict[str, Any]:
    """A copy of a state dict with changes, and without the hash that would find any change of a tensor."""
    changed = copy.deepcopy(state)
    for group in changed.get("param_groups", ()):  # DeepSpeed's has none
        if KEY in group:
            group[KEY]["tensors"] = 0
    for change in changes:
        change.apply(changed)
    return changed
