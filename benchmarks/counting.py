"""How many launches a step takes and how many bytes it moves, counted in a step that is not timed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onebit_triton import OneBitLamb
from onebit_triton.kernels.backends import PASSES
from onebit_triton.kernels.budgets import declared, step_bytes
from onebit_triton.kernels.inductor import Compiled
from onebit_triton.stages import Uncompressed

OVERWRITES = ("copy_", "fill_", "zero_", "normal_")
"""Operations that do not read the tensor that they write in place."""

FREE = (
    "empty", "empty_like", "empty_strided", "new_empty", "lift_fresh", "set_", "_local_scalar_dense", "_unsafe_view",
)  # fmt: skip
"""Operations, besides views, that compute nothing."""

UPDATES = {
    "lamb_update": ("lamb_moments", "trust_ratio", "lamb_apply"),
    "compressed_update": ("fresh_variance", "soft_threshold_rate", "compressed_apply"),
}
"""Passes that are made of others. The backend "inductor" has only the whole."""

NAMES = (*(name for names in PASSES.values() for name in names), *UPDATES)
"""All passes."""


@dataclass
class Count:
    """Launches of one step, and the bytes that they read and write."""

    launches: int = 0
    bytes: float = 0.0


def pass_bytes(name: str, ranks: int, elements: int, block_elements: int) -> float:
    """Bytes that a pass over a bucket must move, as its launcher declares."""
    return sum(declared(part, ranks).total(elements, block_elements) for part in UPDATES.get(name, (name,)))


def record_passes(passes: Any, run: Callable[[], object]) -> list[tuple[str, tuple[Any, ...]]]:
    """Run something once; the passes that it called, and with what."""
    calls = []

    def recorded(name: str) -> Callable[..., None]:
        original = getattr(passes, name)

        def call(*arguments: Any) -> None:
            calls.append((name, arguments))
            original(*arguments)

        return call

    with ExitStack() as stack:
        for name in NAMES:
            if hasattr(passes, name):
                stack.enter_context(patch.object(passes, name, recorded(name)))
        run()
    return calls


def count_launches(passes: Any, run: Callable[[], object]) -> int:
    """Run something of ours once, and count its Triton kernels, or its calls of compiled functions."""
    launches, original = 0, Compiled.__call__

    def call(function: Compiled, *arguments: Any) -> Any:
        nonlocal launches
        launches += 1
        return original(function, *arguments)

    with patch.object(Compiled, "__call__", call):
        calls = record_passes(passes, run)
    return launches if passes.name == "inductor" else sum(name not in UPDATES for name, _ in calls)


def count_step(optimizer: OneBitLamb) -> Count:
    """Count one step of ours; of an eager backend torch's operations, else launches and the bytes that are declared."""
    replica = optimizer._replica
    if replica.passes.name == "torch":
        return count_operations(optimizer.step)
    stage = "uncompressed" if isinstance(optimizer._stage, Uncompressed) else optimizer.stage
    layout = replica.layout
    moved = step_bytes(stage, layout.ranks, block_elements=layout.block_elements) * layout.padded_elements
    return Count(count_launches(replica.passes, optimizer.step), moved)


def count_operations(step: Callable[[], object]) -> Count:
    """Count an eager step: every operation of torch that computes is a launch, which reads and writes its tensors.

    Views, allocations and collectives are none. What numpy does is not seen.
    """
    with _Operations() as seen:
        step()
    return seen.count


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = Count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        if func.namespace == "aten" and not func.is_view and name not in FREE:
            self.count.launches += 1
            self.count.bytes += _bytes_given(func._schema.arguments, name, args, kwargs)
            results = (result,) if len(func._schema.returns) == 1 else result or ()
            fresh = (r for given, r in zip(func._schema.returns, results, strict=True) if given.alias_info is None)
            self.count.bytes += sum(_touched_bytes(tensor) for value in fresh for tensor in _tensors(value))
        return result


def _bytes_given(arguments: Any, name: str, args: Any, kwargs: dict[str, Any]) -> int:
    """Bytes that an operation moves in the tensors it is given; those it returns come on top."""
    values = dict(zip((argument.name for argument in arguments), args, strict=False)) | kwargs
    moved = 0
    for argument in arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        read = not written or not (argument.is_out or name in OVERWRITES)
        moved += sum(_touched_bytes(tensor) for tensor in _tensors(values.get(argument.name))) * (written + read)
    return moved


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _touched_bytes(tensor: Tensor) -> int:
    """Bytes of memory behind a tensor: an expanded one has fewer than its elements."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return elements * tensor.element_size()
