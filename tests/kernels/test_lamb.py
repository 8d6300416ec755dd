"""The three warmup passes, kernel against twin."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from onebit_triton.kernels.backends import Passes
from onebit_triton.kernels.lamb_reference import root
from onebit_triton.kernels.tables import Hyper, Rate

from .bed import CASES, FEW_CASES, MISALIGNED, SMALL, TORCH, TRITON, Bed, Case, check, check_unchanged, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow)")

OPTIONS = [
    replace(
        SMALL,
        name=f"{bias=}, {coeff_bias=}, {decay=}",
        bias_correction=bias,
        coeff_bias_correction=coeff_bias,
        weight_decay=decay,
    )
    for bias, coeff_bias, decay in ((False, True, 0.0), (True, False, 0.3), (True, True, 0.0), (False, False, 0.3))
]
EXACT = [Rate.STEP, Rate.COEFF_CORRECTION, Rate.CORRECTION1, Rate.CORRECTION2, Rate.SCALING, Rate.FACTOR, Rate.COUNT]


def moments(passes: Passes, bed: Bed) -> None:
    passes.lamb_moments(
        bed.params, bed.grads, bed.blocks, bed["exp_avg"], bed["exp_avg_sq"], bed["hyper"], bed["rates"], bed["clip"],
        bed["decision"], bed["partials2"], bed.case.bias_correction,
    )  # fmt: skip


def ratio(passes: Passes, bed: Bed) -> None:
    passes.trust_ratio(bed.blocks, bed["partials2"], bed["hyper"], bed["rates"], bed["decision"])


def apply(passes: Passes, bed: Bed) -> None:
    passes.lamb_apply(
        bed.params, bed.copies, bed.blocks, bed["exp_avg"], bed["exp_avg_sq"], bed["hyper"], bed["rates"],
        bed["decision"], bed.case.bias_correction,
    )  # fmt: skip


def after_moments(case: Case) -> Bed:
    """A bed whose moments and partials the twin has moved."""
    bed = Bed(case)
    moments(TORCH, bed)
    return bed


def after_ratio(case: Case) -> Bed:
    """A bed for which the twin has also computed the rates."""
    bed = after_moments(case)
    ratio(TORCH, bed)
    return bed


@pytest.mark.parametrize("case", [*CASES, *OPTIONS], ids=str)
def test_moments_agree(case: Case) -> None:
    bed = Bed(case)
    written = ["exp_avg", "exp_avg_sq", "partials2"]
    kernel, _ = check(bed, moments, written, rounded=["partials2"], overwritten=["partials2"])
    padding = ~bed.inside()
    assert not kernel["exp_avg"][padding].any()
    assert not kernel["exp_avg_sq"][padding].any()
    squares = bed.flat("param").double().square().view(bed.blocks.blocks, -1).sum(1)
    torch.testing.assert_close(kernel["partials2"][0].double(), squares, rtol=1e-5, atol=0)


@pytest.mark.parametrize("case", [*CASES, *OPTIONS], ids=str)
def test_trust_ratio_agrees(case: Case) -> None:
    bed = after_moments(case)
    kernel, twin = check(bed, ratio, ["rates"], rounded=["rates"])
    assert same_bits(kernel["rates"][:, EXACT], twin["rates"][:, EXACT])
    assert (kernel["rates"][:, Rate.STEP] == 6).all()
    used = kernel["rates"][:, Rate.COEFF_USED]
    zero = (bed.blocks.sum(bed["partials2"][0]) == 0) | (bed.blocks.sum(bed["partials2"][1]) == 0)
    inside = (used >= bed["hyper"][:, Hyper.MIN_COEFF]) & (used <= bed["hyper"][:, Hyper.MAX_COEFF])
    assert (torch.where(zero, used == 1, inside)).all()


@pytest.mark.parametrize("case", [*CASES, *OPTIONS], ids=str)
def test_apply_agrees(case: Case) -> None:
    bed = after_ratio(case)
    check(bed, apply, bed.parameters)


@pytest.mark.usefixtures("loops_as_compiled")
@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_loops_as_compiled_agree(case: Case) -> None:
    test_moments_agree(case)
    test_apply_agrees(case)


@pytest.mark.parametrize("passes", [TRITON, TORCH], ids=lambda passes: passes.name)
def test_ratio_is_one_where_a_norm_is_zero(passes: Passes) -> None:
    bed = Bed(Case("norms", (64, 64, 64, 64)))
    bed["hyper"][:, Hyper.MIN_COEFF], bed["hyper"][:, Hyper.MAX_COEFF] = 2.0, 5.0
    bed["partials2"].copy_(torch.tensor([[0.0, 9.0, 0.0, 9.0], [4.0, 0.0, 0.0, 1.0]]))
    ratio(passes, bed)
    assert bed["rates"][:, Rate.COEFF_USED].tolist() == [1.0, 1.0, 1.0, 3.0]
    assert bed["rates"][:, Rate.UNCLIPPED].tolist() == [1.0, 1.0, 1.0, 3.0]


@pytest.mark.parametrize(("low", "high", "used"), [(0.0, 10.0, 3.0), (3.5, 10.0, 3.5), (0.0, 2.5, 2.5)])
@pytest.mark.parametrize("passes", [TRITON, TORCH], ids=lambda passes: passes.name)
def test_ratio_is_clamped(passes: Passes, low: float, high: float, used: float) -> None:
    bed = Bed(Case("clamp", (64,)))
    bed["hyper"][:, Hyper.MIN_COEFF], bed["hyper"][:, Hyper.MAX_COEFF] = low, high
    bed["partials2"].copy_(torch.tensor([[9.0], [1.0]]))
    before = bed["rates"].clone()
    ratio(passes, bed)
    rates = bed["rates"][0]
    assert rates[Rate.COEFF_USED] == used
    assert rates[Rate.UNCLIPPED] == 3.0
    assert rates[Rate.RATE] == bed["hyper"][0, Hyper.LR] * used
    beta = bed["hyper"][0, Hyper.COEFF_BETA].item()
    assert rates[Rate.COEFF].item() == pytest.approx(beta * before[0, Rate.COEFF].item() + (1 - beta) * used)


def test_more_blocks_than_a_reduction_reads_at_a_time() -> None:
    bed = Bed(Case("many_blocks", (64 * 2100 + 1, 5)))
    bed["partials2"].copy_(torch.rand(2, bed.blocks.blocks, generator=torch.Generator().manual_seed(3)))
    bed["hyper"][:, Hyper.MAX_COEFF] = 10.0
    kernel, _ = check(bed, ratio, ["rates"], rounded=["rates"])
    norms = bed["partials2"][:, :2101].double().sum(1).sqrt()
    assert kernel["rates"][0, Rate.COEFF_USED].item() == pytest.approx((norms[0] / norms[1]).item(), rel=1e-5)


def test_first_step_corrects_bias_fully() -> None:
    """m / (1 - b1) = g and v / (1 - b2) = g g: u is the sign of g."""
    bed = Bed(Case("first", (64, 128), weight_decay=0.0))
    for name in ("exp_avg", "exp_avg_sq", "rates"):
        bed[name].zero_()
    bed["hyper"][:, Hyper.EPS] = 0.0
    kernel, _ = check(bed, moments, ["exp_avg", "exp_avg_sq", "partials2"], rounded=["partials2"])
    torch.testing.assert_close(kernel["partials2"][1], torch.full((3,), 64.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("passes", [TRITON, TORCH], ids=lambda passes: passes.name)
def test_gradients_are_scaled(passes: Passes) -> None:
    plain, scaled = Bed(replace(SMALL, grad_scale=1.0)), Bed(replace(SMALL, grad_scale=0.5))
    for i in scaled.segments:
        scaled[f"grad.{i}"].mul_(2)
    for bed in (plain, scaled):
        moments(passes, bed)
    assert same_bits(plain["exp_avg"], scaled["exp_avg"])
    assert same_bits(plain["exp_avg_sq"], scaled["exp_avg_sq"])


@pytest.mark.parametrize("case", [SMALL, replace(SMALL, dtype=torch.bfloat16, shift=MISALIGNED, name="bf16")], ids=str)
def test_skipped_step_changes_nothing(case: Case) -> None:
    bed = after_ratio(case).skip()
    bed["grad.0"][3] = float("nan")
    for run in (moments, ratio, apply):
        check_unchanged(bed, run)


def test_refuses_wrong_state() -> None:
    bed = Bed(SMALL)
    good = {name: bed[name] for name in ("exp_avg", "exp_avg_sq", "partials2")}
    for name, bad in (
        ("exp_avg", bed["exp_avg"].double()),
        ("exp_avg", bed["exp_avg"][:-64]),
        ("exp_avg_sq", bed["exp_avg_sq"].bfloat16()),
        ("exp_avg_sq", bed["exp_avg_sq"].to("meta")),
        ("partials2", bed["partials4"]),
        ("partials2", torch.empty(bed.blocks.blocks, 2).t()),
    ):
        args = {**good, name: bad}
        with pytest.raises(ValueError, match=f"Invalid {name.rstrip('2')}: must be contiguous torch.float32"):
            TRITON.lamb_moments(
                bed.params, bed.grads, bed.blocks, args["exp_avg"], args["exp_avg_sq"], bed["hyper"], bed["rates"],
                bed["clip"], bed["decision"], args["partials2"], False,
            )  # fmt: skip
    with pytest.raises(ValueError, match="Invalid partials"):
        TRITON.trust_ratio(bed.blocks, bed["partials4"], bed["hyper"], bed["rates"], bed["decision"])


def test_root_of_the_twin_is_correctly_rounded() -> None:
    bits = torch.randint(0, 0x7F800000, (1 << 16,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    x = torch.cat((bits.view(torch.float32), torch.tensor([0.0, 1e-45, 1e-39, float("inf")])))
    assert same_bits(root(x), torch.from_numpy(np.sqrt(x.numpy())))
