"""What a step sends, without computing: our two collectives, and all-reduces of the same elements, in turns.

Over gloo, between processes of one machine: the messages where a network costs least.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from onebit_triton.buckets import message_bytes, plan_layout
from onebit_triton.collectives import Communicator, CompressedAllReduce

from .conftest import Record
from .replicas import (
    BLOCK_ELEMENTS,
    BUCKET_ELEMENTS,
    CLOCK,
    Candidate,
    Measurement,
    elements,
    on_ranks,
    shapes,
    take_turns,
)

RANKS = 2

CPU = torch.device("cpu")


def one_bit(communicator: Communicator, layout: Any) -> Callable[[], None]:
    """Both collectives of every bucket, started and awaited as a compressed step does."""
    sizes = [message_bytes(bucket, layout.block_elements, layout.ranks) for bucket in layout.buckets]
    exchange = CompressedAllReduce(communicator, sizes, layout.fingerprint & 0x7FFFFFFF, CPU)

    def run() -> None:
        for send in (exchange.send_to_servers, exchange.send_to_workers):
            for work in [send(bucket) for bucket in range(len(sizes))]:
                work.wait()

    return run


def all_reduce(communicator: Communicator, layout: Any, dtype: torch.dtype) -> Callable[[], None]:
    """An all-reduce of every bucket."""
    buckets = [torch.zeros(bucket.blocks * layout.block_elements, dtype=dtype) for bucket in layout.buckets]

    def run() -> None:
        for work in [communicator.all_reduce(bucket) for bucket in buckets]:
            work.wait()

    return run


EXCHANGES: dict[str, Callable[[Communicator, Any], Callable[[], None]]] = {
    "onebit": one_bit,
    "all-reduce-fp16": functools.partial(all_reduce, dtype=torch.float16),
    "all-reduce-fp32": functools.partial(all_reduce, dtype=torch.float32),
}


def measure(rank: int, size: str) -> dict[str, Measurement]:
    params = [torch.empty(shape) for shape in shapes(size)]
    layout = plan_layout(params, BLOCK_ELEMENTS, BUCKET_ELEMENTS, RANKS)
    candidates = {}
    for name, build in EXCHANGES.items():
        communicator = Communicator(None)
        traffic = communicator.traffic
        candidates[name] = Candidate(build(communicator, layout), lambda traffic=traffic: sum(traffic.sent.values()))
    return take_turns(candidates)


@pytest.fixture(scope="module")
def measured(size: str) -> dict[str, Measurement]:
    """What was measured at a size, everything in turns when first asked for."""
    return on_ranks(RANKS, measure, size)


@pytest.mark.benchmark(timer=CLOCK)
@pytest.mark.parametrize("implementation", EXCHANGES)
def bench_exchange(
    benchmark: Any, record: Record, measured: dict[str, Measurement], implementation: str, size: str
) -> None:
    found = measured[implementation]
    CLOCK.replay(benchmark, found.seconds)
    record(found.wire_bytes, wire_bytes=found.wire_bytes, elements=elements(size))
