"""The compiled twins against the plain ones: the same bits from pieces of any size, compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from onebit_triton import OneBitLamb
from onebit_triton.kernels import inductor
from onebit_triton.kernels.backends import load_passes
from onebit_triton.kernels.inductor import InductorPasses, plan_groups
from onebit_triton.kernels.tables import Decision

from ..training import gradients, parameters, set_gradients, vector
from .bed import CASES, CPU, RTOL, TORCH, Bed, Case, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow)")

COMPILED = [case for case in CASES if case.name in ("many_tiny", "huge", "three_ranks", "four_ranks")]
"""All of one block size: others are compiled again."""


@pytest.fixture(params=[64, 192, 1 << 20], ids=lambda size: f"piece{size}")
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> InductorPasses:
    """The backend, with pieces of one block, a few, or the whole bucket."""
    monkeypatch.setattr(inductor, "ALONE", 128)
    monkeypatch.setitem(inductor.PIECE_ELEMENTS, "cpu", request.param)
    return PASSES[request.param]


PASSES: dict[int, InductorPasses] = {}


@pytest.fixture(autouse=True, scope="module")
def passes_of_every_size() -> None:
    for size in (64, 192, 1 << 20):
        PASSES[size] = InductorPasses(CPU, TORCH)
        PASSES[size]._piece_elements = size


@given(
    sizes=st.lists(st.integers(1, 700), min_size=1, max_size=12),
    padding=st.integers(0, 3),
    piece=st.integers(1, 600),
)
def test_groups_cover_a_bucket(sizes: list[int], padding: int, piece: int) -> None:
    block = 64
    starts, at = [], 0
    for size in sizes:
        starts.append(at)
        at += -(-size // block) * block
    blocks = at // block + padding
    groups = plan_groups(tuple(sizes), tuple(starts), blocks, block, piece, CPU)
    seen: list[tuple[int, int] | None] = [None] * (blocks * block)
    at = 0
    for group in groups:
        assert group.blocks.start == at
        assert group.backwards == group.pieces[::-1]
        assert len(group.pieces) == 1 or group.segments.stop - group.segments.start == 1
        for one in group.pieces:
            assert one.blocks.start == at
            assert one.rows.start == at - group.blocks.start
            assert one.count * block <= max(block, piece)
            at = one.blocks.stop
            filled = set()
            for number, start, stop, where in one.spans:
                for i in range(start, stop):
                    seen[one.elements.start + where + i - start] = (number, i)
                    filled.add(where + i - start)
            gaps = {i for start, stop in one.gaps for i in range(start, stop)}
            assert filled | gaps == set(range(one.count * block))
            assert not filled & gaps
        assert at == group.blocks.stop
    assert at == blocks
    expected = {
        start + i: (n, i) for n, (start, size) in enumerate(zip(starts, sizes, strict=True)) for i in range(size)
    }
    assert {i: found for i, found in enumerate(seen) if found is not None} == expected


def norms(passes: Any, bed: Bed) -> None:
    passes.gradient_norms(bed.grads, bed.blocks, bed["norms"])


def flatten(passes: Any, bed: Bed) -> None:
    passes.flatten_gradients(bed.grads, bed.blocks, bed["averaged"], 3)


def lamb(passes: Any, bed: Bed) -> None:
    passes.lamb_update(
        bed.params, bed.copies, bed.grads, bed.blocks, bed["exp_avg"], bed["exp_avg_sq"], bed["hyper"], bed["rates"],
        bed["clip"], bed["decision"], bed["partials2"], bed.case.bias_correction,
    )  # fmt: skip


def compress(passes: Any, bed: Bed, dense: bool = False) -> None:
    passes.compress_momentum(
        bed.grads, bed.blocks, bed["x"], bed["x_scale"], bed["old"], bed["exp_avg"] if dense else None, bed["hyper"],
        bed["rates"], bed["clip"], bed["new"], bed["partials2"],
    )  # fmt: skip


def compress_dense(passes: Any, bed: Bed) -> None:
    compress(passes, bed, dense=True)


def undo(passes: Any, bed: Bed) -> None:
    passes.undo_momentum(
        bed.grads, bed.blocks, bed["x"], bed["x_scale"], bed["old"], None, bed["hyper"], bed["rates"], bed["clip"],
        bed["decision"],
    )  # fmt: skip


def serve(passes: Any, bed: Bed) -> None:
    passes.reduce_chunk(
        bed["received"], bed["y"], bed["y_scale"], bed["decision"], bed["message"], bed["chunk_partials"],
        bed.case.block,
    )  # fmt: skip


def update(passes: Any, bed: Bed, mode: str = "bits") -> None:
    passes.compressed_update(
        bed.params, bed.copies, bed.grads if mode == "uncompressed" else None, bed.blocks, bed["old"], bed["new"],
        None if mode == "bits" else bed["exp_avg"], bed["exp_avg_sq"], bed["exp_avg_sq_fresh"], bed["hyper"],
        bed["rates"], bed["clip"], bed["decision"], bed["partials4"], bed.case.bias_correction,
    )  # fmt: skip


def update_dense(passes: Any, bed: Bed) -> None:
    update(passes, bed, "dense")


def update_uncompressed(passes: Any, bed: Bed) -> None:
    update(passes, bed, "uncompressed")


RUNS: dict[Callable[[Any, Bed], None], set[str]] = {
    norms: {"norms"},
    flatten: {"averaged"},
    lamb: {"param", "exp_avg", "exp_avg_sq", "rates"},
    compress: {"x", "new", "partials2"},
    compress_dense: {"x", "new", "partials2"},
    undo: set(),
    serve: {"y", "message", "chunk_partials"},
    update: {"param", "old", "exp_avg_sq_fresh", "rates"},
    update_dense: {"param", "old", "exp_avg_sq_fresh", "rates"},
    update_uncompressed: {"param", "exp_avg", "exp_avg_sq_fresh", "rates"},
}
ROUNDED = ("norms", "rates", "partials2", "partials4", "chunk_partials")
"""What is a sum, or follows from one."""


@pytest.mark.parametrize("skip", [False, True], ids=["step", "skipped"])
@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.__name__)
@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_compiled_agrees(compiled: InductorPasses, case: Case, run: Callable[[Any, Bed], None], skip: bool) -> None:
    bed = Bed(case, masks=run is not lamb)
    if skip:
        bed.skip()
    twin, found = bed.clone(), bed.clone()
    run(TORCH, twin)
    run(compiled, found)
    assert not found.memory.damaged()
    for name in bed.memory.names:
        group = name.partition(".")[0]
        if group in ("partials2", "partials4") and run not in (compress, compress_dense):
            continue  # scratch of an update
        if skip and group in ROUNDED and run is not norms:
            continue
        updated = group in bed.parameters and run in (lamb, update, update_dense, update_uncompressed)
        if group in ROUNDED or updated:
            last_bit = torch.finfo(bed[name].dtype).eps if group == "copy" else 0.0
            torch.testing.assert_close(found[name], twin[name], rtol=4 * RTOL + last_bit, atol=1e-7, equal_nan=True)
        else:
            assert same_bits(found[name], twin[name]), name
    changed = {name.partition(".")[0] for name in bed.memory.names if not same_bits(found[name], bed[name])}
    scratch = {"chunk_partials", "partials4"} | ({"partials2"} if run is lamb else set())
    if not skip:
        expected = RUNS[run] | (bed.parameters if "param" in RUNS[run] else set())
        assert changed - scratch == expected - scratch
    elif run is undo:
        assert changed == {"x", "x_scale"}
    elif run not in (norms, flatten, compress, compress_dense):
        assert changed <= scratch


def test_compiled_once() -> None:
    """Nothing is compiled again when the rate, the step, the stage or the gradients' places change."""
    params = parameters(shapes=[(40, 64), (300, 64), (64,), (5,)])
    optimizer = OneBitLamb(params, lr=0.01, freeze_step=3, backend="inductor", block_elements=64, bucket_elements=2**14)
    for step in range(5):
        set_gradients(params, gradients(step, 0, params))
        optimizer.step()
    assert optimizer.stage == "compression"
    optimizer.rewarm(2)
    with torch.compiler.set_stance("fail_on_recompile"):
        for step in range(5, 12):
            optimizer.param_groups[0]["lr"] *= 0.9
            optimizer.param_groups[0]["betas"] = (0.8, 0.9 + 0.001 * step)
            set_gradients(params, gradients(step, 0, params))
            optimizer.step()
        other = OneBitLamb(params, freeze_step=2, backend="inductor", block_elements=64, bucket_elements=2**13)
        for step in range(4):
            set_gradients(params, gradients(step, 0, params))
            other.step()
    assert optimizer.stage == other.stage == "compression"
    assert optimizer.metrics()["skipped_steps"] == other.metrics()["skipped_steps"] == 0


def test_skips_like_the_others() -> None:
    params = parameters()
    optimizer = OneBitLamb(params, freeze_step=2, backend="inductor", block_elements=64)
    for step in range(4):
        grads = gradients(step, 0, params)
        if step in (1, 3):
            grads[0][0] = float("nan")
        before = vector(params)
        set_gradients(params, grads)
        optimizer.step()
        assert (vector(params) == before).all() == (step in (1, 3))
    assert int(optimizer._replica.decision[Decision.SKIPPED]) == 2


def test_missing_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    def fail() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", fail)
    with pytest.raises(RuntimeError, match=r"backend='inductor' compiles C\+\+ .* backend='torch' needs none"):
        load_passes("inductor", CPU)
