"""The passes that every rank makes alike, kernel against twin: fresh variance, layer rate, update."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from onebit_triton.kernels.backends import Passes
from onebit_triton.kernels.planes_reference import header
from onebit_triton.kernels.tables import HEADER_BYTES, Hyper, Rate

from .bed import CASES, FEW_CASES, MISALIGNED, SMALL, TORCH, TRITON, Bed, Case, check, check_unchanged, same_bits

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero|overflow)")

BOTH = pytest.mark.parametrize("passes", [TRITON, TORCH], ids=lambda passes: passes.name)
OPTIONS = [
    replace(
        SMALL,
        name=f"{bias=}, {coeff=}, {decay=}",
        bias_correction=bias,
        coeff_bias_correction=coeff,
        weight_decay=decay,
    )
    for bias, coeff, decay in ((False, True, 0.0), (True, False, 0.3), (True, True, 0.0), (False, False, 0.3))
]
EXACT = [Rate.STEP, Rate.COEFF, Rate.COEFF_CORRECTION, Rate.CORRECTION1, Rate.CORRECTION2, Rate.SCALING, Rate.COUNT]


class Fresh:
    """The variance pass: "bits" as usual, "dense" in the first compressed step, "uncompressed" on one rank."""

    def __init__(self, mode: str) -> None:
        self.mode = mode

    @property
    def written(self) -> list[str]:
        return ["exp_avg_sq_fresh", "partials4", "exp_avg" if self.mode == "uncompressed" else "old"]

    def __call__(self, passes: Passes, bed: Bed) -> None:
        passes.fresh_variance(
            bed.params, bed.grads if self.mode == "uncompressed" else None, bed.blocks, bed["old"], bed["new"],
            None if self.mode == "bits" else bed["exp_avg"], bed["exp_avg_sq"], bed["exp_avg_sq_fresh"],
            bed["hyper"], bed["rates"], bed["clip"], bed["decision"], bed["partials4"], bed.case.bias_correction,
        )  # fmt: skip


class Apply:
    """The update, with the momentum read from bits or from a dense tensor."""

    def __init__(self, dense: bool) -> None:
        self.dense = dense

    def __call__(self, passes: Passes, bed: Bed) -> None:
        passes.compressed_apply(
            bed.params, bed.copies, bed.blocks, bed["old"], bed["new"], bed["exp_avg"] if self.dense else None,
            bed["exp_avg_sq"], bed["hyper"], bed["rates"], bed["decision"], bed.case.bias_correction,
        )  # fmt: skip


def rate(passes: Passes, bed: Bed) -> None:
    passes.soft_threshold_rate(bed.blocks, bed["partials4"], bed["hyper"], bed["rates"], bed["decision"])


OTHER_MODES = ("dense", "uncompressed")
CASES_AND_MODES = pytest.mark.parametrize(
    ("case", "mode"), [*((case, "bits") for case in CASES), *((c, m) for c in FEW_CASES for m in OTHER_MODES)], ids=str
)


def check_fresh(bed: Bed, mode: str) -> Bed:
    """Compare the variance pass; what holds for every input."""
    run = Fresh(mode)
    kernel, _ = check(bed, run, run.written, rounded=["partials4"], overwritten=["partials4"])
    if mode != "uncompressed":
        assert same_bits(kernel["old:planes"], bed["new:planes"]), "the momentum is up to date"
        assert same_bits(kernel["old"][:, :HEADER_BYTES], bed["old"][:, :HEADER_BYTES]), "but for its scale"
    part = bed.part()
    assert same_bits(kernel["exp_avg_sq_fresh"][~part], bed["exp_avg_sq_fresh"][~part])
    assert kernel["exp_avg_sq_fresh"].isfinite().all()
    assert not kernel["exp_avg"][~part].any()
    without = ~part.view(bed.blocks.blocks, -1).any(1)
    assert not kernel["partials4"][:2, without].any(), "a block without elements that take part"
    return kernel


@CASES_AND_MODES
def test_fresh_variance_agrees(case: Case, mode: str) -> None:
    check_fresh(Bed(case, masks=True), mode)


@pytest.mark.parametrize("case", [*CASES, *OPTIONS], ids=str)
def test_rate_agrees(case: Case) -> None:
    bed = Bed(case, masks=True)
    Fresh("bits")(TORCH, bed)
    kernel, twin = check(bed, rate, ["rates"], rounded=["rates"])
    assert same_bits(kernel["rates"][:, EXACT], twin["rates"][:, EXACT])
    counted = bed["rates"][:, Rate.COUNT] > 0
    factor, last = kernel["rates"][:, Rate.FACTOR], bed["rates"][:, Rate.FACTOR]
    low, high = last * bed["hyper"][:, Hyper.THRESHOLD_LOW], last * bed["hyper"][:, Hyper.THRESHOLD_HIGH]
    assert ((factor >= low) & (factor <= high))[counted].all()
    assert (factor[~counted] == 1).all()


@pytest.mark.parametrize(
    ("case", "dense"), [*((case, False) for case in CASES), *((case, True) for case in FEW_CASES)], ids=str
)
def test_apply_agrees(case: Case, dense: bool) -> None:
    bed = Bed(case, masks=True)
    kernel, _ = check(bed, Apply(dense), bed.parameters if dense else bed.parameters | {"old"})
    if not dense:
        assert same_bits(kernel["old"][:, :HEADER_BYTES], bed["new"][:, :HEADER_BYTES])
        assert same_bits(kernel["old:planes"], bed["old:planes"])


@pytest.mark.usefixtures("loops_as_compiled")
@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_loops_as_compiled_agree(case: Case) -> None:
    check_fresh(Bed(case, masks=True), "bits")
    test_apply_agrees(case, False)


@BOTH
@pytest.mark.parametrize("decay", [0.0, 0.25])
def test_only_weight_decay_moves_masked_elements(passes: Passes, decay: float) -> None:
    bed = Bed(replace(SMALL, weight_decay=decay), masks=True)
    bed["rates"][:, Rate.RATE] = 0.5
    moved = bed.clone()
    Apply(False)(passes, moved)
    masked = ~bed.part()[:70]
    before, after = bed["param.0"], moved["param.0"]
    assert same_bits(after[masked], before[masked] - 0.5 * (decay * before[masked]))
    assert (after[~masked] != before[~masked]).all()


@BOTH
@pytest.mark.parametrize(
    ("partials", "hyper", "factor"),
    [
        # max ratio, |up|^2, |u|^2; columns; f, when f_last = 1
        ((3.0, 4.0, 4.0), {}, 3.0),
        ((3.0, 4.0, 16.0), {Hyper.WEIGHT_DECAY: 0.1}, 2.0),
        ((3.0, 4.0, 16.0), {Hyper.WEIGHT_DECAY: 0.0}, 3.0),
        ((3.0, 16.0, 4.0), {Hyper.WEIGHT_DECAY: 0.1}, 3.0),
        ((3.0, 0.0, 0.0), {Hyper.WEIGHT_DECAY: 0.1}, 3.0),
        ((3.0, 0.0, 4.0), {Hyper.WEIGHT_DECAY: 0.1}, 1.0),
        ((3.0, 4.0, 4.0), {Hyper.FACTOR_MAX: 2.5}, 2.5),
        ((0.25, 4.0, 4.0), {Hyper.FACTOR_MIN: 0.75}, 0.75),
        ((3.0, 4.0, 4.0), {Hyper.THRESHOLD_HIGH: 1.25}, 1.25),
        ((0.25, 4.0, 4.0), {Hyper.THRESHOLD_LOW: 0.875}, 0.875),
        ((3.0, 4.0, 4.0), {Hyper.FACTOR_MAX: 2.5, Hyper.THRESHOLD_LOW: 2.75}, 2.75),
    ],
)
def test_factor(passes: Passes, partials: tuple[float, float, float], hyper: dict[Hyper, float], factor: float) -> None:
    bed = Bed(Case("factor", (64,)))
    columns = {
        Hyper.WEIGHT_DECAY: 0.0, Hyper.FACTOR_MIN: 0.0, Hyper.FACTOR_MAX: 100.0, Hyper.THRESHOLD_LOW: 0.0,
        Hyper.THRESHOLD_HIGH: 100.0, **hyper,
    }  # fmt: skip
    for column, value in columns.items():
        bed["hyper"][0, column] = value
    bed["rates"][0, Rate.FACTOR] = 1.0
    bed["partials4"].copy_(torch.tensor([*partials, 1.0]).view(4, 1))
    rate(passes, bed)
    assert bed["rates"][0, Rate.FACTOR].item() == factor


@BOTH
@pytest.mark.parametrize("correct", [False, True])
def test_rate_in_numbers(passes: Passes, correct: bool) -> None:
    bed = Bed(Case("rate", (64,)))
    for column, value in ((Hyper.LR, 0.5), (Hyper.COEFF_BIAS_CORRECTION, float(correct)), (Hyper.WEIGHT_DECAY, 0.0)):
        bed["hyper"][0, column] = value
    bed["rates"].copy_(torch.arange(1.0, len(Rate) + 1))
    for column, value in ((Rate.COEFF, 3.0), (Rate.COEFF_CORRECTION, 0.25), (Rate.FACTOR, 2.0), (Rate.COUNT, 64.0)):
        bed["rates"][0, column] = value
    bed["partials4"].copy_(torch.tensor([[2.0], [1.0], [1.0], [1.0]]))
    rate(passes, bed)
    coeff = 12.0 if correct else 3.0
    expected = torch.arange(1.0, len(Rate) + 1)
    expected[[Rate.STEP, Rate.COEFF, Rate.COEFF_CORRECTION, Rate.FACTOR]] = torch.tensor([2.0, 3.0, 0.25, 2.0])
    expected[[Rate.COUNT, Rate.COEFF_USED, Rate.RATE]] = torch.tensor([64.0, coeff * 2.0, 0.5 * coeff * 2.0])
    expected[Rate.UNCLIPPED] = 2.0
    assert bed["rates"][0].tolist() == expected.tolist()


@BOTH
@pytest.mark.parametrize(
    ("p_squares", "u_squares", "ratio", "used"),
    [
        # C f is 6; the trust ratio is |p| / |u| within 0.5 and 2.5
        (16.0, 4.0, 1.5, 3.0), (16.0, 4.0, 3.5, 6.0), (16.0, 4.0, float("inf"), 6.0), (100.0, 1.0, 2.0, 5.0),
        (1.0, 100.0, 2.0, 1.0), (0.0, 4.0, 1.5, 1.5), (16.0, 0.0, 1.5, 1.5),
    ],
)  # fmt: skip
def test_rate_bound(passes: Passes, p_squares: float, u_squares: float, ratio: float, used: float) -> None:
    bed = Bed(Case("bound", (64,)))
    for column, value in (
        (Hyper.LR, 0.5), (Hyper.COEFF_BIAS_CORRECTION, 0.0), (Hyper.WEIGHT_DECAY, 0.0), (Hyper.MIN_COEFF, 0.5),
        (Hyper.MAX_COEFF, 2.5), (Hyper.MAX_RATE_RATIO, ratio),
    ):  # fmt: skip
        bed["hyper"][0, column] = value
    bed["rates"][0, Rate.COEFF], bed["rates"][0, Rate.FACTOR] = 3.0, 2.0
    bed["partials4"].copy_(torch.tensor([[2.0], [1.0], [u_squares], [p_squares]]))
    rate(passes, bed)
    assert bed["rates"][0, [Rate.FACTOR, Rate.COEFF_USED, Rate.RATE]].tolist() == [2.0, used, 0.5 * used]


@pytest.mark.parametrize("largest", [0, 1024, 2100])
def test_more_blocks_than_a_reduction_reads_at_a_time(largest: int) -> None:
    bed = Bed(Case("many_blocks", (64 * 2100 + 1, 5)))
    random = torch.Generator().manual_seed(3)
    bed["partials4"].copy_(torch.rand(4, bed.blocks.blocks, generator=random))
    bed["partials4"][0, largest] = 1.5
    bed["hyper"][0, Hyper.WEIGHT_DECAY] = 0.1
    bed["rates"][0, Rate.FACTOR] = 1.25
    kernel, _ = check(bed, rate, ["rates"], rounded=["rates"])
    sums = bed["partials4"][1:, :2101].double().sum(1)
    share = min(1.0, float((sums[0] / sums[1]).sqrt()))
    expected = min(max(1.5 * share + 1 - share, 0.9 * 1.25), 1.1 * 1.25)
    assert kernel["rates"][0, Rate.FACTOR].item() == pytest.approx(expected, rel=1e-5)


@BOTH
def test_reconstructed_gradient_in_numbers(passes: Passes) -> None:
    """g~ = (m_new - b1 m) / (1-b1); v' = b2 v' + (1-b2) g~ g~."""
    bed = Bed(Case("numbers", (64,), bias_correction=False))
    for column, value in (
        (Hyper.BETA1, 0.75), (Hyper.ONE_MINUS_BETA1, 0.25), (Hyper.BETA2, 0.5), (Hyper.ONE_MINUS_BETA2, 0.5),
        (Hyper.EPS, 0.5), (Hyper.WEIGHT_DECAY, 0.0),
    ):  # fmt: skip
        bed["hyper"][0, column] = value
    bed["rates"][0, Rate.SCALING] = 2.0
    header(bed["old"], 0).fill_(8.0)
    header(bed["new"], 0).fill_(4.0)
    bed["old:planes"].fill_(0b11110000)
    bed["new:planes"].fill_(0b11001100)
    bed["exp_avg_sq"].fill_(6.25)
    bed["exp_avg_sq_fresh"].fill_(2.0)
    Fresh("bits")(passes, bed)
    old = torch.tensor([-4.0, -4.0, -4.0, -4.0, 4.0, 4.0, 4.0, 4.0]).repeat_interleave(8)
    new = torch.tensor([-2.0, -2.0, 2.0, 2.0, -2.0, -2.0, 2.0, 2.0]).repeat_interleave(8)
    gradient = (new - 0.75 * old) / 0.25
    assert sorted(set(gradient.tolist())) == [-20.0, -4.0, 4.0, 20.0]
    assert same_bits(bed["exp_avg_sq_fresh"], 1.0 + 0.5 * gradient.square())
    ratio, direction, u, p = bed["partials4"][:, 0].tolist()
    assert ratio == pytest.approx(3.0 / 3.5)
    assert direction == u == pytest.approx(64 * (2 / 3) ** 2)
    assert p == pytest.approx(bed["param.0"].double().square().sum().item())


@pytest.mark.parametrize("mode", ["bits", "dense", "uncompressed"])
@pytest.mark.parametrize("case", [SMALL, replace(SMALL, dtype=torch.bfloat16, shift=MISALIGNED, name="bf16")], ids=str)
def test_skipped_step_changes_nothing(case: Case, mode: str) -> None:
    bed = Bed(case, masks=True).skip()
    bed["grad.0"][3] = float("nan")
    for run in (Fresh(mode), rate, Apply(mode == "uncompressed")):
        check_unchanged(bed, run)


def test_refuses_wrong_state() -> None:
    bed = Bed(SMALL)
    good = {name: bed[name] for name in ("exp_avg_sq", "exp_avg_sq_fresh", "partials4")}
    for name, bad in (
        ("exp_avg_sq", bed["exp_avg_sq"].double()),
        ("exp_avg_sq", bed["exp_avg_sq"][:-64]),
        ("exp_avg_sq_fresh", bed["exp_avg_sq"].bfloat16()),
        ("exp_avg_sq_fresh", bed["exp_avg_sq"].to("meta")),
        ("partials4", bed["partials2"]),
        ("partials4", torch.empty(bed.blocks.blocks, 4).t()),
    ):
        args = {**good, name: bad}
        with pytest.raises(ValueError, match=f"Invalid {name.rstrip('4')}: must be contiguous torch.float32"):
            TRITON.fresh_variance(
                bed.params, None, bed.blocks, bed["old"], bed["new"], None, args["exp_avg_sq"],
                args["exp_avg_sq_fresh"], bed["hyper"], bed["rates"], bed["clip"], bed["decision"],
                args["partials4"], False,
            )  # fmt: skip
    with pytest.raises(ValueError, match="Invalid partials"):
        TRITON.soft_threshold_rate(bed.blocks, bed["partials2"], bed["hyper"], bed["rates"], bed["decision"])


def test_refuses_wrong_messages_where_it_reads_them() -> None:
    bed = Bed(SMALL)
    short = bed["new"][:, :-8].contiguous()
    for old, new, called in ((short, bed["new"], "old_messages"), (bed["old"], short, "new_messages")):
        with pytest.raises(ValueError, match=f"Invalid {called}: must be contiguous torch.uint8"):
            TRITON.fresh_variance(
                bed.params, None, bed.blocks, old, new, None, bed["exp_avg_sq"], bed["exp_avg_sq_fresh"],
                bed["hyper"], bed["rates"], bed["clip"], bed["decision"], bed["partials4"], False,
            )  # fmt: skip
    for messages, exp_avg, called in ((short, None, "new_messages"), (bed["new"], bed["exp_avg"].half(), "exp_avg")):
        with pytest.raises(ValueError, match=f"Invalid {called}: must be contiguous"):
            TRITON.compressed_apply(
                bed.params, bed.copies, bed.blocks, bed["old"], messages, exp_avg, bed["exp_avg_sq"], bed["hyper"],
                bed["rates"], bed["decision"], False,
            )  # fmt: skip
