"""Every pass on its own, as a step of one rank of four calls it. Results are checked against the twin first."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from onebit_triton.kernels.backends import load_passes
from onebit_triton.kernels.planes_reference import header, planes
from onebit_triton.kernels.tables import Header, TensorTable

from .conftest import Record
from .counting import NAMES, count_launches, count_operations, pass_bytes, record_passes
from .gpu.loopback import one_rank_of
from .replicas import BLOCK_ELEMENTS, DEVICE, padded_elements, parameters, wait

RANKS = 4

STAGES = ("warmup", "compression")

Calls = dict[str, tuple[Any, tuple[Any, ...]]]


@pytest.fixture(scope="module")
def calls(backend: str, size: str) -> Calls:
    """Pass -> the optimizer's passes, and what this one was called with in a step, on one bucket.

    The learning rate is 0, so that a pass can be repeated.
    """
    found: Calls = {}
    for stage in STAGES:
        optimizer = one_rank_of(
            RANKS, parameters(size), lr=0.0, freeze_step=2 if stage == "compression" else 10**9, backend=backend,
            max_grad_norm=1e6, bucket_elements=2**62,
        )  # fmt: skip
        for _ in range(4):
            optimizer.step()
        assert optimizer.stage == stage
        replica = optimizer._replica
        found |= {name: (replica.passes, args) for name, args in record_passes(replica.passes, optimizer.step)}
        replica.point_at_tensors()
    return found


def tensors(arguments: tuple[Any, ...]) -> Iterator[Tensor]:
    """Every tensor that a pass was given; of messages, headers apart from planes, of which every bit must be right."""
    for argument in arguments:
        if isinstance(argument, TensorTable):
            yield from (tensor for tensor in argument.tensors if tensor is not None)
        elif isinstance(argument, Tensor) and argument.dtype == torch.uint8 and argument.dim() == 2:
            yield planes(argument)
            yield from (header(argument, field) for field in Header if field != Header.CHECK)
        elif isinstance(argument, Tensor) and argument.dtype != torch.uint8:
            yield argument


def check(name: str, passes: Any, arguments: tuple[Any, ...]) -> None:
    """Refuse to time a pass whose result is not its twin's."""
    copies = copy.deepcopy(arguments)
    getattr(passes, name)(*arguments)
    getattr(load_passes("torch", DEVICE), name)(*copies)
    if name.endswith("_update"):  # the last tensor is scratch, before a flag
        arguments, copies = arguments[:-2], copies[:-2]
    for number, (found, expected) in enumerate(zip(tensors(arguments), tensors(copies), strict=True)):
        # Sums may be taken in another order; no tolerance is wide enough for a wrong bit in the planes.
        torch.testing.assert_close(
            found, expected, rtol=1e-5, atol=1e-6, msg=lambda text, number=number: f"{name}, tensor {number}: {text}"
        )


@pytest.mark.parametrize("name", NAMES)
def bench_pass(benchmark: Any, record: Record, calls: Calls, name: str, backend: str, size: str) -> None:
    if name not in calls:
        pytest.skip(f"{backend} has {name} only as a part of another pass")
    passes, arguments = calls[name]
    check(name, passes, arguments)

    def run() -> None:
        getattr(passes, name)(*arguments)
        wait()

    benchmark(run)
    bucket = padded_elements(size)
    launches = count_launches(passes, run) if backend != "torch" else 0
    launches = launches or count_operations(run).launches  # what is not compiled is eager
    record(pass_bytes(name, RANKS, bucket, BLOCK_ELEMENTS), launches=launches, elements=bucket)
