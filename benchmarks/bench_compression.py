"""The passes that compress: worker, server, and what every rank does with the result, on one bucket of four chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from onebit_triton.buckets import Bucket, message_bytes, plan_layout
from onebit_triton.kernels.backends import Passes, load_passes
from onebit_triton.kernels.tables import Clip, Decision, Hyper, Rate

from .replicas import BACKENDS, DEVICE, SIZES, parameters, wait

RANKS, BLOCK = 4, 1024

BYTES = {
    "compress_momentum": 12.25,
    "reduce_chunk": 1 / 8 + (8 + 1 / 8) / RANKS,
    "fresh_variance": 16.25,
    "compressed_apply": 12.125,
}
"""Bytes that a pass must move for each element of the bucket, fp32."""


def calls(passes: Passes, size: str) -> tuple[dict[str, Callable[[], None]], int]:
    """The passes, ready to run again and again on one bucket, and the bucket's elements."""
    params = parameters(size)
    layout = plan_layout(params, BLOCK, 2**62, RANKS)
    planned = layout.buckets[0]
    hyper = torch.full((len(params), len(Hyper)), 0.1, device=DEVICE)
    rates = torch.ones(len(params), len(Rate), device=DEVICE)
    rates[:, Rate.RATE] = 0.0
    bucket = Bucket(planned, params, BLOCK, hyper, rates, torch.zeros(planned.blocks, device=DEVICE))
    bucket.params.set(params)
    bucket.grads.set([p.grad for p in params])
    v, v_fresh = (torch.rand(bucket.elements, device=DEVICE) for _ in range(2))
    x, y = torch.randn(bucket.elements, device=DEVICE), torch.randn(bucket.elements // RANKS, device=DEVICE)
    width = message_bytes(planned, BLOCK, RANKS)
    old, new, received = (torch.zeros(RANKS, width, dtype=torch.uint8, device=DEVICE) for _ in range(3))
    scale, decision = torch.ones(1, device=DEVICE), torch.zeros(len(Decision), dtype=torch.int32, device=DEVICE)
    clip = torch.ones(len(Clip), device=DEVICE)
    tables = (hyper, rates)
    chunk_sums = torch.zeros(planned.blocks // RANKS, device=DEVICE)
    return {
        "compress_momentum": lambda: passes.compress_momentum(
            bucket.grads, bucket.map, x, scale, old, None, *tables, clip, new, bucket.partials[:2]
        ),
        "reduce_chunk": lambda: passes.reduce_chunk(received, y, scale, decision, old[0], chunk_sums, BLOCK),
        "fresh_variance": lambda: passes.fresh_variance(
            bucket.params, None, bucket.map, old, new, None, v, v_fresh, *tables, clip, decision, bucket.partials
        ),
        "compressed_apply": lambda: passes.compressed_apply(
            bucket.params, bucket.map, new, None, v, *tables, decision
        ),
    }, bucket.elements  # fmt: skip


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", BYTES)
def bench_pass(benchmark: Any, name: str, backend: str, size: str) -> None:
    found, elements = calls(load_passes(backend, DEVICE), size)

    def run() -> None:
        found[name]()
        wait()

    benchmark(run)
    moved = BYTES[name] * elements
    benchmark.extra_info.update(bytes=moved, elements=elements, device=DEVICE.type, torch=torch.__version__)
    if benchmark.stats is not None:
        benchmark.extra_info["GB/s"] = moved / benchmark.stats.stats.median / 1e9
