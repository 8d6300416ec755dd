"""Whole optimizer steps on one rank and on two, of all implementations in turns, one thread a rank.

A warmup step excludes averaging the gradients, a compressed step includes the exchange.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from .conftest import Record
from .counting import Count, count_operations, count_step
from .replicas import CLOCK, DEVICE, Candidate, Measurement, elements, on_ranks, onebit_lamb, parameters, take_turns
from .rivals import RIVALS, deepspeed_bytes_sent, missing

RANKS = (1, 2) if DEVICE.type == "cpu" else (1,)
"""gloo has no all-to-all of CUDA tensors."""

STAGES = ("warmup", "compression")

OURS = "onebit-"
"""Our implementations are called so, and then as the backend."""

Case = tuple[str, str, str]
"""Implementation, stage, size."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = [(OURS + backend, stage) for backend in metafunc.config.getoption("backend") for stage in STAGES]
    cases += [(rival, stage) for rival in RIVALS for stage in RIVALS[rival]]
    metafunc.parametrize("implementation, stage", cases)


def ours(params: list[Any], stage: str, backend: str, alone: Any) -> Candidate:
    optimizer = onebit_lamb(params, stage, backend, alone)

    def count() -> Count:
        assert optimizer.stage == stage
        return count_step(optimizer)

    return Candidate(optimizer.step, lambda: sum(optimizer.bytes_sent.values()), count)


def theirs(params: list[Any], stage: str, name: str) -> Candidate:
    optimizer = RIVALS[name][stage](params)
    bytes_sent = deepspeed_bytes_sent if name.startswith("deepspeed") else int
    return Candidate(optimizer.step, bytes_sent, lambda: count_operations(optimizer.step))


def measure(rank: int, ranks: int, cases: list[Case]) -> dict[Case, Measurement]:
    """All steps on one rank, those of one size and stage in turns."""
    alone = [dist.new_group([r]) for r in range(ranks)][rank]
    found = {}
    for stage, size in sorted({(stage, size) for _, stage, size in cases}):
        candidates = {}
        for name, *where in cases:
            if where == [stage, size]:
                params = parameters(size, rank)
                backend = name.removeprefix(OURS)
                candidates[name] = (
                    theirs(params, stage, name) if backend == name else ours(params, stage, backend, alone)
                )
        found |= {(name, stage, size): measurement for name, measurement in take_turns(candidates).items()}
    return found


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, ranks: int) -> dict[Case, Measurement]:
    """What was measured on so many ranks: all cases that are to run, when first asked for."""
    items = [item.callspec.params for item in request.session.items if item.function is bench_step]
    cases = {(p["implementation"], p["stage"], p["size"]): None for p in items if p["ranks"] == ranks}
    return on_ranks(ranks, measure, ranks, [case for case in cases if not missing(case[0], DEVICE)])


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("ranks", RANKS, scope="module")
def bench_step(
    benchmark: Any,
    record: Record,
    request: pytest.FixtureRequest,
    implementation: str,
    stage: str,
    ranks: int,
    size: str,
) -> None:
    reason = missing(implementation, DEVICE)
    if reason:
        pytest.skip(reason)
    found = request.getfixturevalue("measured")[implementation, stage, size]
    CLOCK.replay(benchmark, found.seconds)
    record(found.count.bytes, launches=found.count.launches, wire_bytes=found.wire_bytes, elements=elements(size))
