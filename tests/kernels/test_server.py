"""The server's passes, kernel against twin."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onebit_triton.kernels.backends import Passes
from onebit_triton.kernels.planes_reference import check_sum, header, lazy_error, masked_zero
from onebit_triton.kernels.tables import HEADER_BYTES, Decision, Fault, Header

from .bed import (
    CASES,
    FEW_CASES,
    RTOL,
    SMALL,
    TORCH,
    TRITON,
    Bed,
    Case,
    check,
    check_unchanged,
    numpy_planes,
    same_bits,
)

BOTH = pytest.mark.parametrize("passes", [TRITON, TORCH], ids=lambda passes: passes.name)
WRITTEN = ["y", "message", "chunk_partials"]


def reduce(passes: Passes, bed: Bed) -> None:
    passes.reduce_chunk(
        bed["received"], bed["y"], bed["y_scale"], bed["decision"], bed["message"], bed["chunk_partials"],
        bed.case.block,
    )  # fmt: skip


def seal(passes: Passes, bed: Bed) -> None:
    passes.seal_server(
        bed["chunk_partials"],
        bed["chunk_count"],
        bed["tag"],
        bed["stamp"],
        bed["decision"],
        bed["message"],
        bed["y_scale"],
    )


def poison_message(bed: Bed) -> Bed:
    """Planes that are wrong everywhere, so that each must be written."""
    right = bed.clone()
    reduce(TORCH, right)
    bed["message"][HEADER_BYTES:] = ~right["message"][HEADER_BYTES:]
    return bed


def numpy_sum(bed: Bed) -> np.ndarray:
    """mean_i(S_i sign(x_i)) + E in fp64, zero where marked."""
    block, total = bed.case.block, np.zeros(bed["y"].numel())
    for message in bed["received"].numpy():
        scale = message[:4].view(np.float32)[0].astype(np.float64)
        signs = np.unpackbits(message[HEADER_BYTES:].reshape(-1, block // 8, 1), axis=2, bitorder="little")
        total += np.where(signs.transpose(0, 2, 1).reshape(-1), scale, -scale)
    error = lazy_error(bed["y"].double(), bed["y_scale"].double()).numpy()
    return np.where(masked_zero(bed["y"]).numpy(), 0.0, total / bed.case.ranks + error)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reduce_agrees(case: Case) -> None:
    bed = poison_message(Bed(case, masks=True))
    kernel, _ = check(bed, reduce, WRITTEN, rounded=["chunk_partials"], overwritten=["chunk_partials"])
    y = kernel["y"]
    np.testing.assert_allclose(y.numpy(), numpy_sum(bed), rtol=0, atol=1e-7)
    assert torch.equal(masked_zero(y), masked_zero(bed["y"])), "marks stay, and no other element becomes one"
    np.testing.assert_array_equal(kernel["message"][HEADER_BYTES:].numpy(), numpy_planes(y, case.block))
    squares = y.double().square().view(bed.chunk_blocks, -1).sum(1)
    torch.testing.assert_close(kernel["chunk_partials"].double(), squares, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("loops_as_compiled")
@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_loops_as_compiled_agree(case: Case) -> None:
    test_reduce_agrees(case)


def test_sum_runs_in_rank_order() -> None:
    """Bitwise: scales whose sum depends on the order, in every combination of signs."""
    bed = Bed(Case("order", (64 * 4 * 2,), ranks=4))
    header(bed["received"], 0).copy_(torch.tensor([1e8, 1.0, 3e-8, 1e8]))
    for rank in range(4):
        bits = [np.packbits([j >> rank & 1] * 8)[0] for j in range(8)] * bed.chunk_blocks
        bed["received:planes"][rank].copy_(torch.tensor(bits, dtype=torch.uint8))
    kernel, _ = check(bed, reduce, WRITTEN, rounded=["chunk_partials"])
    scales = np.array([1e8, 1.0, 3e-8, 1e8], dtype=np.float32)
    error = lazy_error(bed["y"], bed["y_scale"]).numpy()
    for j in range(8):
        total = np.float32(0)
        for rank in range(4):
            total += scales[rank] if j >> rank & 1 else -scales[rank]
        at = np.arange(8) * 8 + j
        np.testing.assert_array_equal(kernel["y"].numpy()[at], total / np.float32(4) + error[at])


def test_ties_count_as_positive() -> None:
    """Two ranks that disagree, and no error: y is zero, its sign is plus, and it is not a mark."""
    bed = Bed(Case("tie", (100,), ranks=2), masks=True)
    header(bed["received"], 0).fill_(0.5)
    bed["received:planes"][1] = ~bed["received:planes"][0]
    bed["y_scale"].fill_(0.25)
    part = bed.part()[:64]
    bed["y"].copy_(torch.where(part, 0.25 * (1 - 2.0 * (torch.arange(64) % 2)), -0.0))
    for passes in (TRITON, TORCH):
        copied = bed.clone()
        reduce(passes, copied)
        assert not copied["y"].any()
        assert torch.equal(masked_zero(copied["y"]), ~part)
        assert (copied["message"][HEADER_BYTES:] == 255).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_seal_agrees(case: Case) -> None:
    bed = Bed(case, masks=True)
    reduce(TORCH, bed)
    header(bed["message"].unsqueeze(0), 3).fill_(-1)
    header(bed["message"].unsqueeze(0), 1).fill_(-1)
    kernel, twin = check(bed, seal, ["message", "y_scale"], rounded=["message", "y_scale"])
    scale = float(bed["y"].double().square().sum().sqrt() / bed["chunk_count"].double().clamp(min=1).sqrt())
    for sealed in (kernel, twin):
        message = sealed["message"].unsqueeze(0)
        assert sealed["y_scale"].item() == pytest.approx(scale, rel=1e-5)
        assert same_bits(header(message, 0), sealed["y_scale"])
        assert [header(message, 1).item(), header(message, 2).item()] == [0, 0.0]
        assert header(message, 3).item() == bed["tag"].item()


@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_l1_scales_agree(case: Case) -> None:
    def reduce_l1(passes: Passes, bed: Bed) -> None:
        passes.reduce_chunk(
            bed["received"], bed["y"], bed["y_scale"], bed["decision"], bed["message"], bed["chunk_partials"],
            bed.case.block, True,
        )  # fmt: skip

    def seal_l1(passes: Passes, bed: Bed) -> None:
        passes.seal_server(
            bed["chunk_partials"], bed["chunk_count"], bed["tag"], bed["stamp"], bed["decision"], bed["message"],
            bed["y_scale"], True,
        )  # fmt: skip

    bed, _ = check(Bed(case, masks=True), reduce_l1, WRITTEN, rounded=["chunk_partials"])
    sealed, _ = check(bed, seal_l1, ["message", "y_scale"], rounded=["message", "y_scale"])
    mean = float(bed["y"].double().abs().sum() / bed["chunk_count"].double().clamp(min=1))
    assert sealed["y_scale"].item() == pytest.approx(mean, rel=1e-5)


@BOTH
def test_scale_of_a_chunk_of_padding(passes: Passes) -> None:
    bed = Bed(SMALL)
    bed["chunk_partials"].zero_()
    bed["chunk_count"].zero_()
    seal(passes, bed)
    assert bed["y_scale"].item() == 0.0


@BOTH
def test_seal_of_more_blocks_than_a_reduction_reads_at_a_time(passes: Passes) -> None:
    bed = Bed(SMALL)
    partials = torch.rand(2500, generator=torch.Generator().manual_seed(2))
    passes.seal_server(
        partials, torch.tensor([777.0]), bed["tag"], bed["stamp"], bed["decision"], bed["message"], bed["y_scale"]
    )
    assert bed["y_scale"].item() == pytest.approx(float((partials.double().sum() / 777).sqrt()), rel=RTOL)


def test_skipped_step_changes_nothing() -> None:
    check_unchanged(Bed(SMALL, masks=True).skip(), reduce)


@BOTH
def test_skipped_step_is_sealed_with_the_old_scale(passes: Passes) -> None:
    bed = Bed(SMALL, masks=True).skip()
    before = bed.clone()
    bed["chunk_partials"].fill_(float("nan"))
    bed["decision"][[Decision.FAULT, Decision.BAD_RANK]] = torch.tensor([Fault.CORRUPT, 5], dtype=torch.int32)
    seal(passes, bed)
    message = bed["message"].unsqueeze(0)
    assert same_bits(bed["y_scale"], before["y_scale"])
    assert same_bits(header(message, 0), before["y_scale"])
    assert header(message, Header.TAG).item() == before["tag"].item()
    assert header(message, Header.FLAGS).item() == Fault.CORRUPT | 5 << 8
    assert check_sum(message).item() == 0
    assert same_bits(bed["message"][HEADER_BYTES:], before["message"][HEADER_BYTES:])
    assert bed["decision"][Decision.SKIP] == 1


def test_refuses_wrong_buffers() -> None:
    bed = Bed(SMALL)
    good = {name: bed[name] for name in ("received", "y", "message")}
    for name, bad in (
        ("received", bed["received"].int()),
        ("received", bed["received"].to("meta")),
        ("y", bed["x"]),
        ("y", bed["y"].double()),
        ("message", bed["message"][:-1]),
        ("message", bed["received"]),
    ):
        args = {**good, name: bad}
        with pytest.raises(ValueError, match=f"Invalid {name}: must be contiguous"):
            TRITON.reduce_chunk(
                args["received"], args["y"], bed["y_scale"], bed["decision"], args["message"],
                bed["chunk_partials"], SMALL.block,
            )  # fmt: skip
