"""The worker's passes, kernel against twin: momentum, error, planes, headers, and taking a step back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from onebit_triton.kernels.backends import Passes
from onebit_triton.kernels.planes_reference import check_sum, header, lazy_error, masked_zero
from onebit_triton.kernels.tables import Clip, Decision, Fault, Header, Hyper, Rate

from .bed import (
    CASES,
    FEW_CASES,
    MISALIGNED,
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

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow)")

BOTH = pytest.mark.parametrize("passes", [TRITON, TORCH], ids=lambda passes: passes.name)
DENSE = pytest.mark.parametrize("dense", [False, True], ids=["bits", "dense"])
CASES_AND_MODES = pytest.mark.parametrize(
    ("case", "dense"), [*((case, False) for case in CASES), *((case, True) for case in FEW_CASES)], ids=str
)
THREE_BLOCKS = Case("three_blocks", (70, 3), grad_scale=0.5)
WRITTEN = ["x", "new", "partials2"]
OVERWRITTEN = ["new:planes", "partials2"]


class Compress:
    """The compressing pass, with the momentum read from bits or from a dense tensor, for scales of either kind."""

    def __init__(self, dense: bool, l1: bool = False) -> None:
        self.dense, self.l1 = dense, l1

    def __call__(self, passes: Passes, bed: Bed) -> None:
        passes.compress_momentum(
            bed.grads, bed.blocks, bed["x"], bed["x_scale"], bed["old"], bed["exp_avg"] if self.dense else None,
            bed["hyper"], bed["rates"], bed["clip"], bed["new"], bed["partials2"], self.l1,
        )  # fmt: skip


class Undo(Compress):
    """The pass that takes a skipped step back."""

    def __call__(self, passes: Passes, bed: Bed) -> None:
        passes.undo_momentum(
            bed.grads, bed.blocks, bed["x"], bed["x_scale"], bed["old"], bed["exp_avg"] if self.dense else None,
            bed["hyper"], bed["rates"], bed["clip"], bed["decision"],
        )  # fmt: skip


def seal(passes: Passes, bed: Bed) -> None:
    passes.seal_worker(
        bed["partials2"], bed["count"], bed["tag"], bed["stamp"], bed["decision"], bed["new"], bed["x_scale"]
    )


def compressed(case: Case, dense: bool = False) -> Bed:
    """A bed that the twin has compressed and sealed."""
    bed = Bed(case, masks=True)
    Compress(dense)(TORCH, bed)
    seal(TORCH, bed)
    return bed


def check_compress(bed: Bed, dense: bool, l1: bool = False) -> Bed:
    """Compare the compressing pass; what holds for every input."""
    kernel, _ = check(bed, Compress(dense, l1), WRITTEN, rounded=["partials2"], overwritten=OVERWRITTEN)
    x = kernel["x"]
    assert x.isfinite().all()
    assert torch.equal(masked_zero(x), masked_zero(bed["x"])), "marks stay, and no other element becomes one"
    np.testing.assert_array_equal(kernel["new:planes"].flatten().numpy(), numpy_planes(x, bed.case.block))
    sizes = (x.double().abs() if l1 else x.double().square()).view(bed.blocks.blocks, -1).sum(1)
    torch.testing.assert_close(kernel["partials2"][0].double(), sizes, rtol=1e-5, atol=0)
    return kernel


@CASES_AND_MODES
def test_compress_agrees(case: Case, dense: bool) -> None:
    bed = Bed(case, masks=True)
    kernel = check_compress(bed, dense)
    g = bed.flat("grad").double() * case.grad_scale
    squares = g.square().view(bed.blocks.blocks, -1).sum(1)
    torch.testing.assert_close(kernel["partials2"][1].double(), squares, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("loops_as_compiled")
@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_loops_as_compiled_agree(case: Case) -> None:
    test_compress_agrees(case, False)
    test_undo_agrees_and_restores(case, False)


@DENSE
def test_first_compressed_step_has_no_error(dense: bool) -> None:
    bed = Bed(SMALL, masks=True)
    bed["x_scale"].zero_()
    bed["x"].copy_(torch.where(bed.part(), 0.0, -0.0))
    kernel = check_compress(bed, dense)
    moving = kernel["x"].view(bed.blocks.blocks, -1)[0, :64] != 0
    assert torch.equal(moving, bed.part()[:64])


def test_zero_counts_as_positive() -> None:
    """No gradient, no momentum, no error: x is zero, its sign is plus, and it is not a mark."""
    bed = Bed(Case("zero", (70, 3)), masks=True)
    bed.missing = frozenset(bed.segments)
    bed["exp_avg"].copy_(torch.where(torch.arange(bed.elements) % 2 == 0, 0.0, -0.0))
    bed["x"].copy_(torch.where(bed.part(), bed["x_scale"] * (1 - 2 * (torch.arange(bed.elements) % 2)), -0.0))
    for passes in (TRITON, TORCH):
        copied = bed.clone()
        Compress(True)(passes, copied)
        assert not copied["x"].any()
        assert torch.equal(masked_zero(copied["x"]), ~bed.part())
        assert (copied["new:planes"] == 255).all()


@DENSE
@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (float("nan"), torch.float32),
        (float("inf"), torch.float32),
        (1e20, torch.float32),
        (float("nan"), torch.float16),
        (-3e38, torch.bfloat16),
    ],
)
def test_gradient_that_is_not_finite(value: float, dtype: torch.dtype, dense: bool) -> None:
    """It counts as zero in x, wherever it stands, and shows in the sum of squares and in every header."""
    bed = Bed(replace(THREE_BLOCKS, dtype=dtype), masks=True)
    clean = bed.clone()
    for i, at in ((0, 5), (0, 69), (1, 0)):
        bed[f"grad.{i}"][at] = value
        clean[f"grad.{i}"][at] = 0.0
    kernel = check_compress(bed, dense)
    Compress(dense)(TORCH, clean)
    assert same_bits(kernel["x"], clean["x"])
    assert same_bits(kernel["new:planes"], clean["new:planes"])
    assert not kernel["partials2"][1].isfinite().any()
    sealed, _ = check(kernel, seal, ["new", "x_scale"], rounded=["new", "x_scale"])
    assert header(sealed["new"], 1).tolist() == [Fault.NONFINITE]
    assert sealed["x_scale"].isfinite().all()


def test_gradients_whose_sum_of_squares_overflows_are_flagged() -> None:
    bed = Bed(SMALL, masks=True)
    bed["grad.0"][:40] = 1.5e19
    bed["clip"][Clip.GRAD_SCALE] = 1.0
    bed["rates"][:, Rate.SCALING] = 1.0
    kernel = check_compress_of_huge(bed)
    assert kernel["partials2"][1, 0].isinf()
    sealed, _ = check(kernel, seal, ["new", "x_scale"], rounded=["new", "x_scale"])
    assert header(sealed["new"], 1).tolist() == [Fault.NONFINITE] * SMALL.ranks


def check_compress_of_huge(bed: Bed) -> Bed:
    kernel, _ = check(bed, Compress(False), WRITTEN, rounded=["partials2"], overwritten=OVERWRITTEN)
    assert kernel["x"].isfinite().all()
    return kernel


def test_clipping_factor_applies_before_squares() -> None:
    """A gradient of 1e25 whose clipped square is finite takes part."""
    bed = Bed(SMALL, masks=True)
    bed["grad.0"][bed.part()[:70]] = 1e25
    bed["clip"][Clip.GRAD_SCALE] = 1e-24
    kernel = check_compress(bed, False)
    assert kernel["partials2"].isfinite().all()
    assert (kernel["x"][:64][bed.part()[:64]] > 0).all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_seal_agrees(case: Case) -> None:
    bed = Bed(case, masks=True)
    Compress(False)(TORCH, bed)
    kernel, twin = check(bed, seal, ["new", "x_scale"], rounded=["new", "x_scale"])
    x = bed["x"].double()
    scale = float(x.square().sum().sqrt() / bed.part().sum().clamp(min=1).sqrt())
    squares = float((bed.flat("grad").double() * case.grad_scale).square().sum())
    for sealed in (kernel, twin):
        assert sealed["x_scale"].item() == pytest.approx(scale, rel=1e-5)
        assert same_bits(header(sealed["new"], 0), sealed["x_scale"].expand(case.ranks))
        assert header(sealed["new"], 1).tolist() == [0] * case.ranks
        assert header(sealed["new"], 2).tolist() == pytest.approx([squares] * case.ranks, rel=1e-5)
        assert header(sealed["new"], Header.TAG).tolist() == bed["tag"].tolist() * case.ranks
        step = int(bed["decision"][Decision.COUNTED] + bed["decision"][Decision.SKIPPED])
        assert header(sealed["new"], Header.STEP).tolist() == [step] * case.ranks
        assert header(sealed["new"], Header.SENDER).tolist() == [1] * case.ranks
        assert header(sealed["new"], Header.SETTINGS).tolist() == [0x7654321] * case.ranks
        assert check_sum(sealed["new"]).tolist() == [0] * case.ranks
        assert same_bits(sealed["new:planes"], bed["new:planes"])


@pytest.mark.parametrize(
    ("x_squares", "g_squares", "flag"),
    [
        (1.0, 2.0, 0),
        (float("nan"), 2.0, Fault.NONFINITE),
        (float("inf"), 2.0, Fault.NONFINITE),
        (1.0, float("nan"), Fault.NONFINITE),
        (1.0, float("inf"), Fault.NONFINITE),
        (3e38, 2.0, Fault.NONFINITE),
    ],
)
@BOTH
def test_seal_flags(passes: Passes, x_squares: float, g_squares: float, flag: int) -> None:
    bed = Bed(SMALL)
    bed["partials2"][0], bed["partials2"][1] = x_squares, g_squares
    seal(passes, bed)
    assert header(bed["new"], Header.FLAGS).tolist() == [flag] * SMALL.ranks
    bed["decision"][Decision.DAMAGED] = Fault.DAMAGED
    seal(passes, bed)
    assert header(bed["new"], Header.FLAGS).tolist() == [flag | Fault.DAMAGED] * SMALL.ranks


@DENSE
@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_l1_scales_agree(case: Case, dense: bool) -> None:
    bed = check_compress(Bed(case, masks=True), dense, l1=True)

    def seal_l1(passes: Passes, bed: Bed) -> None:
        passes.seal_worker(
            bed["partials2"], bed["count"], bed["tag"], bed["stamp"], bed["decision"], bed["new"], bed["x_scale"], True
        )

    sealed, _ = check(bed, seal_l1, ["new", "x_scale"], rounded=["new", "x_scale"])
    mean = float(bed["x"].double().abs().sum() / bed["count"].double().clamp(min=1))
    assert sealed["x_scale"].item() == pytest.approx(mean, rel=1e-5)
    error = torch.where(bed.part(), lazy_error(bed["x"], sealed["x_scale"]), 0.0)
    assert float(error.norm()) <= float(bed["x"].norm()) * (1 + 1e-6)


@BOTH
def test_scale_of_a_bucket_without_elements(passes: Passes) -> None:
    bed = Bed(SMALL)
    bed["partials2"].zero_()
    bed["count"].zero_()
    seal(passes, bed)
    assert bed["x_scale"].item() == 0.0
    assert header(bed["new"], 0).tolist() == [0.0] * SMALL.ranks


@BOTH
def test_seal_of_more_blocks_than_a_reduction_reads_at_a_time(passes: Passes) -> None:
    bed = Bed(SMALL)
    partials = torch.rand(2, 2500, generator=torch.Generator().manual_seed(2))
    passes.seal_worker(
        partials, torch.tensor([777.0]), bed["tag"], bed["stamp"], bed["decision"], bed["new"], bed["x_scale"]
    )
    sums = partials.double().sum(1)
    assert bed["x_scale"].item() == pytest.approx(float((sums[0] / 777).sqrt()), rel=RTOL)
    assert header(bed["new"], 2)[0].item() == pytest.approx(float(sums[1]), rel=RTOL)


def rounding(bed: Bed, x: Tensor) -> Tensor:
    """What forming x and taking it back may cost: a few roundings of the largest number on the way."""
    return 4 * torch.finfo(torch.float32).eps * (x.abs() + lazy_error(bed["x"], bed["x_scale"]).abs() + 1e-2)


@CASES_AND_MODES
def test_undo_agrees_and_restores(case: Case, dense: bool) -> None:
    before, bed = Bed(case, masks=True), compressed(case, dense).skip()
    kernel, _ = check(bed, Undo(dense), ["x", "x_scale"])
    error = torch.where(before.part(), lazy_error(before["x"], before["x_scale"]), 0.0)
    assert ((kernel["x"] - error).abs() <= rounding(before, bed["x"])).all()
    assert torch.equal(masked_zero(kernel["x"]), ~before.part())
    assert kernel["x_scale"].item() == 0.0


@DENSE
def test_undo_of_a_gradient_that_is_not_finite(dense: bool) -> None:
    before = Bed(THREE_BLOCKS, masks=True)
    before["grad.0"][3] = float("nan")
    before["grad.0"][69] = -float("inf")
    before["grad.1"][0] = 1e30
    bed = before.clone()
    Compress(dense)(TORCH, bed)
    seal(TORCH, bed)
    kernel, _ = check(bed.skip(), Undo(dense), ["x", "x_scale"])
    error = torch.where(before.part(), lazy_error(before["x"], before["x_scale"]), 0.0)
    assert ((kernel["x"] - error).abs() <= rounding(before, bed["x"])).all()


@DENSE
@pytest.mark.parametrize("case", [SMALL, replace(SMALL, dtype=torch.bfloat16, shift=MISALIGNED, name="bf16")], ids=str)
def test_undo_does_nothing_to_a_step_that_was_taken(case: Case, dense: bool) -> None:
    check_unchanged(compressed(case, dense), Undo(dense))


@BOTH
@DENSE
def test_error_survives_a_skipped_step(passes: Passes, dense: bool) -> None:
    """The step after a skipped one sends what it would have sent without it, but for ties."""
    bed = Bed(THREE_BLOCKS, masks=True)
    straight, detour = bed.clone(), bed.clone()
    Compress(dense)(passes, straight)
    Compress(dense)(passes, detour)
    seal(passes, detour)
    Undo(dense)(passes, detour.skip())
    Compress(dense)(passes, detour)
    difference = (straight["x"] - detour["x"]).abs()
    assert (difference <= 2 * rounding(bed, straight["x"])).all()
    clear = (straight["x"].abs() > 1e-6) | ~bed.part()
    assert clear.float().mean() > 0.9
    assert torch.equal((straight["x"] >= 0)[clear], (detour["x"] >= 0)[clear])


@BOTH
def test_error_and_gradient_of_every_column(passes: Passes) -> None:
    """x = (b1 m + (1-b1) g) s + e, each factor alone, in numbers."""
    bed = Bed(Case("numbers", (64,), bias_correction=False), masks=False)
    bed["hyper"][0, Hyper.BETA1], bed["hyper"][0, Hyper.ONE_MINUS_BETA1] = 0.75, 0.25
    bed["rates"][0, Rate.SCALING] = 4.0
    bed["clip"][Clip.GRAD_SCALE] = 0.5
    header(bed["old"], 0).fill_(8.0)
    bed["old:planes"].fill_(0b10101010)
    bed["grad.0"].fill_(24.0)
    bed["x_scale"].fill_(1.5)
    bed["x"].copy_(torch.where(torch.arange(64) < 32, 2.0, -1.0))
    Compress(False)(passes, bed)
    signs = torch.tensor([-1.0, 1.0]).repeat_interleave(8).repeat(4)
    error = torch.where(torch.arange(64) < 32, 0.5, 0.5)
    assert same_bits(bed["x"], (0.75 * signs * 2.0 + 0.25 * 12.0) * 4.0 + error)
    assert bed["partials2"][:, 0].tolist() == [32 * 18.5**2 + 32 * 6.5**2, 64 * 144.0]


def test_refuses_wrong_buffers() -> None:
    bed = Bed(SMALL)
    good = {name: bed[name] for name in ("x", "old", "new", "partials2")}
    for name, bad in (
        ("x", bed["x"].bfloat16()),
        ("x", bed["x"][64:]),
        ("x", bed["x"].to("meta")),
        ("old", bed["old"][:1]),
        ("old", bed["old"].int()),
        ("new", bed["new"].view(torch.int8)),
        ("new", bed["new"].t().contiguous().t()),
        ("partials2", bed["partials4"]),
    ):
        args = {**good, name: bad}
        called = {"old": "old_messages", "new": "new_messages", "partials2": "partials"}.get(name, name)
        with pytest.raises(ValueError, match=f"Invalid {called}: must be contiguous"):
            TRITON.compress_momentum(
                bed.grads, bed.blocks, args["x"], bed["x_scale"], args["old"], None, bed["hyper"], bed["rates"],
                bed["clip"], args["new"], args["partials2"],
            )  # fmt: skip
    with pytest.raises(ValueError, match="Invalid x: must be contiguous"):
        TRITON.undo_momentum(
            bed.grads, bed.blocks, bed["x"].half(), bed["x_scale"], bed["old"], None, bed["hyper"], bed["rates"],
            bed["clip"], bed["decision"],
        )  # fmt: skip
    with pytest.raises(ValueError, match="Invalid exp_avg: must be contiguous"):
        TRITON.undo_momentum(
            bed.grads, bed.blocks, bed["x"], bed["x_scale"], bed["old"], bed["x"][:64], bed["hyper"], bed["rates"],
            bed["clip"], bed["decision"],
        )  # fmt: skip
    with pytest.raises(ValueError, match="Invalid count: must be contiguous"):
        TRITON.seal_worker(
            bed["partials2"], bed["partials2"][0], bed["tag"], bed["stamp"], bed["decision"], bed["new"], bed["x_scale"]
        )
