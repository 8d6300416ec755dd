"""The bytes that launchers declare are the bytes that kernels load and store, and a step stays within its budget."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from onebit_triton.kernels.backends import PASSES, Passes
from onebit_triton.kernels.budgets import STEPS, declared, step_bytes
from onebit_triton.kernels.tables import SAMPLES, Roll

from .bed import TRITON, Bed, Case
from .test_variance import Apply, Fresh

FULL = Case("full", (64 * 6, 64 * 4, 64 * 2), ranks=4, bias_correction=False)
"""Whole blocks only: what is declared counts padding, which parameters and gradients do not have."""

CASES = [FULL, replace(FULL, name="bf16", dtype=torch.bfloat16), replace(FULL, name="one_rank", ranks=1, block=128)]


class Counter:
    """Bytes of the loads and stores of vectors, and those of single values, since the last `reset`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        builder = interpreter.interpreter_builder
        load, store = builder.create_masked_load, builder.create_masked_store
        self.reset()

        def masked_load(ptrs: Any, mask: Any, *rest: Any) -> Any:
            (self.vectors if ptrs.data.size > 1 else self.scalars)["read"] += self._bytes(ptrs, mask)
            return load(ptrs, mask, *rest)

        def masked_store(ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
            (self.vectors if ptrs.data.size > 1 else self.scalars)["written"] += self._bytes(ptrs, mask)
            return store(ptrs, value, mask, *rest)

        monkeypatch.setattr(builder, "create_masked_load", masked_load)
        monkeypatch.setattr(builder, "create_masked_store", masked_store)

    @staticmethod
    def _bytes(ptrs: Any, mask: Any) -> int:
        return int(np.broadcast_to(mask.data, ptrs.data.shape).sum()) * (ptrs.get_element_ty().primitive_bitwidth // 8)

    def reset(self) -> None:
        self.vectors, self.scalars = {"read": 0, "written": 0}, {"read": 0, "written": 0}


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Counter:
    return Counter(monkeypatch)


def moments(passes: Passes, bed: Bed) -> None:
    passes.lamb_moments(
        bed.params, bed.grads, bed.blocks, bed["exp_avg"], bed["exp_avg_sq"], bed["hyper"], bed["rates"], bed["clip"],
        bed["decision"], bed["partials2"], False,
    )  # fmt: skip


def lamb_apply(passes: Passes, bed: Bed) -> None:
    passes.lamb_apply(
        bed.params, bed.copies, bed.blocks, bed["exp_avg"], bed["exp_avg_sq"], bed["hyper"], bed["rates"],
        bed["decision"], False,
    )  # fmt: skip


def compress(momentum: str) -> Callable[[Passes, Bed], None]:
    def run(passes: Passes, bed: Bed) -> None:
        passes.compress_momentum(
            bed.grads, bed.blocks, bed["x"], bed["x_scale"], bed["old"],
            bed["exp_avg"] if momentum == "dense" else None, bed["hyper"], bed["rates"], bed["clip"], bed["new"],
            bed["partials2"],
        )  # fmt: skip

    return run


def undo(passes: Passes, bed: Bed) -> None:
    passes.undo_momentum(
        bed.grads, bed.blocks, bed["x"], bed["x_scale"], bed["old"], None, bed["hyper"], bed["rates"], bed["clip"],
        bed["decision"],
    )  # fmt: skip


RUNS: dict[tuple[str, str], Callable[[Passes, Bed], None]] = {
    ("flatten_gradients", "bits"): lambda t, b: t.flatten_gradients(b.grads, b.blocks, b["averaged"], 3),
    ("gradient_norms", "bits"): lambda t, b: t.gradient_norms(b.grads, b.blocks, b["norms"]),
    ("decide_averaged", "bits"): lambda t, b: t.decide_averaged(
        b["norms"], torch.ones(b.case.ranks), b["roll"], b["decision"], b["clip"], False
    ),
    ("lamb_moments", "bits"): moments,
    ("trust_ratio", "bits"): lambda t, b: t.trust_ratio(
        b.blocks, b["partials2"], b["hyper"], b["rates"], b["decision"]
    ),
    ("lamb_apply", "bits"): lamb_apply,
    ("compress_momentum", "bits"): compress("bits"),
    ("compress_momentum", "dense"): compress("dense"),
    ("seal_worker", "bits"): lambda t, b: t.seal_worker(
        b["partials2"], b["count"], b["tag"], b["stamp"], b["decision"], b["new"], b["x_scale"]
    ),
    ("undo_momentum", "bits"): undo,
    ("reduce_chunk", "bits"): lambda t, b: t.reduce_chunk(
        b["received"], b["y"], b["y_scale"], b["decision"], b["message"], b["chunk_partials"], b.case.block
    ),
    ("seal_server", "bits"): lambda t, b: t.seal_server(
        b["chunk_partials"], b["chunk_count"], b["tag"], b["stamp"], b["decision"], b["message"], b["y_scale"]
    ),
    ("fresh_variance", "bits"): Fresh("bits"),
    ("fresh_variance", "dense"): Fresh("dense"),
    ("fresh_variance", "uncompressed"): Fresh("uncompressed"),
    ("soft_threshold_rate", "bits"): lambda t, b: t.soft_threshold_rate(
        b.blocks, b["partials4"], b["hyper"], b["rates"], b["decision"]
    ),
    ("compressed_apply", "bits"): Apply(False),
    ("compressed_apply", "uncompressed"): Apply(True),
}
PER_BLOCK = ("gradient_norms", "lamb_moments", "compress_momentum", "reduce_chunk", "fresh_variance")
HEADERS = {"compressed_apply": (32, 32), "seal_worker": (4 * SAMPLES, 0), "seal_server": (4 * SAMPLES, 0)}
"""Bytes for each message that a pass reads and writes besides."""


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("name", "momentum"), RUNS, ids=lambda value: value)
def test_launcher_moves_what_it_declares(name: str, momentum: str, case: Case, counter: Counter) -> None:
    bed = Bed(case)
    bed.missing = frozenset()
    bed = bed.clone()
    counter.reset()
    RUNS[name, momentum](TRITON, bed)
    size = case.dtype.itemsize
    found = declared(name, case.ranks, size, size, momentum)
    elements, blocks = bed.elements, bed.blocks.blocks
    read, written = (size * case.ranks * (momentum == "bits") for size in HEADERS.get(name, (0, 0)))
    if name == "seal_server":
        read //= case.ranks
    if name == "decide_averaged" and case.ranks > 1:
        read = len(Roll) * case.ranks * 4
    assert counter.vectors["read"] == elements * found.read + blocks * found.block_read + read
    assert counter.vectors["written"] == elements * found.written + written
    if name in PER_BLOCK:
        assert counter.scalars["written"] == blocks * found.block_written


def test_every_pass_declares() -> None:
    counted = {name for name, _ in RUNS}
    passes = {name for names in PASSES.values() for name in names}
    assert passes - counted == {"clip_local", "decide_exchanged", "accept_returned"}, "which read a few numbers"
    assert {declared(name).total(1024, 1024) for name in passes - counted} == {0.0}
    assert {name for names in STEPS.values() for name in names} <= passes


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_steps_stay_within_their_budgets(ranks: int) -> None:
    """fp32, and what there is for each block is little, though sums are taken anew for every rank's message."""
    for stage, budget in (("warmup", 44), ("compression", 41 + 8 / ranks)):
        streams = sum(declared(name, ranks).read + declared(name, ranks).written for name in STEPS[stage])
        assert streams <= budget
        assert step_bytes(stage, ranks) - streams <= 0.02 * streams
