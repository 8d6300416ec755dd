"""Passes over gradients alone, kernel against twin."""

from __future__ import annotations

import pytest
import torch

from onebit_triton.buckets import block_map, plan_layout
from onebit_triton.kernels.backends import Passes, load_passes
from onebit_triton.kernels.tables import TensorTable

from .bed import CASES, CPU, FEW_CASES, SMALL, TORCH, TRITON, Bed, Case, check, same_bits


def flatten(passes: Passes, bed: Bed) -> None:
    passes.flatten_gradients(bed.grads, bed.blocks, bed["averaged"], 3)


def norms(passes: Passes, bed: Bed) -> None:
    passes.gradient_norms(bed.grads, bed.blocks, bed["norms"])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_flatten_agrees(case: Case) -> None:
    bed = Bed(case)
    kernel, _ = check(bed, flatten, ["averaged"], overwritten=["averaged"])
    expected = bed.flat("grad").double() / 3
    assert same_bits(kernel["averaged"], expected.float().to(bed.grad_dtype))
    assert not kernel["averaged"][~bed.inside()].any()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_norms_agree(case: Case) -> None:
    bed = Bed(case)
    kernel, _ = check(bed, norms, ["norms"], rounded=["norms"], overwritten=["norms"])
    expected = bed.flat("grad").double().square().view(bed.blocks.blocks, -1).sum(1)
    torch.testing.assert_close(kernel["norms"].double(), expected, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("loops_as_compiled")
@pytest.mark.parametrize("case", FEW_CASES, ids=str)
def test_loops_as_compiled_agree(case: Case) -> None:
    test_flatten_agrees(case)
    test_norms_agree(case)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_gradients_show(value: float, dtype: torch.dtype) -> None:
    bed = Bed(Case("values", (70, 3, 64), dtype=dtype))
    bed["grad.0"][69] = value
    kernel, _ = check(bed, norms, ["norms"], rounded=["norms"], overwritten=["norms"])
    assert kernel["norms"].isfinite().tolist() == [True, False, True, True]
    kernel, _ = check(bed, flatten, ["averaged"], overwritten=["averaged"])
    assert kernel["averaged"].isfinite().logical_not().nonzero().tolist() == [[69]]


@pytest.mark.filterwarnings("ignore:overflow")
def test_squares_that_overflow_show() -> None:
    bed = Bed(SMALL)
    bed["grad.2"][63] = -3e19
    kernel, _ = check(bed, norms, ["norms"], rounded=["norms"], overwritten=["norms"])
    assert kernel["norms"].isfinite().logical_not().nonzero().tolist() == [[3]]


@pytest.mark.parametrize("passes", [TRITON, TORCH], ids=lambda passes: passes.name)
def test_all_gradients_missing(passes: Passes) -> None:
    bed = Bed(SMALL)
    bed.missing = frozenset(bed.segments)
    bed = bed.clone()
    flatten(passes, bed)
    norms(passes, bed)
    assert same_bits(bed["averaged"], torch.zeros(bed.elements))
    assert same_bits(bed["norms"], torch.zeros(bed.blocks.blocks))


@pytest.mark.parametrize("passes", [TRITON, TORCH], ids=lambda passes: passes.name)
def test_memory_order_of_strided_gradients(passes: Passes) -> None:
    values = torch.arange(1.0, 61.0)
    gradient = values.view(5, 12).t()
    layout = plan_layout([gradient], 64, 64, 1).buckets[0]
    table = TensorTable(1, torch.float32, CPU)
    table.set([gradient])
    out = torch.full((64,), float("nan"))
    passes.flatten_gradients(table, block_map(layout, 64, CPU), out, 1)
    assert same_bits(out, torch.cat((values, torch.zeros(4))))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("passes", [TRITON, TORCH, load_passes("inductor", CPU)], ids=lambda passes: passes.name)
def test_flatten_rounds_to_what_is_sent(passes: Passes, dtype: torch.dtype) -> None:
    bed = Bed(SMALL)
    out = torch.full((bed.elements,), float("nan"), dtype=dtype)
    passes.flatten_gradients(bed.grads, bed.blocks, out, 3)
    assert same_bits(out, (bed.flat("grad") / torch.tensor(3.0)).to(dtype))


def test_refuses_wrong_buffers() -> None:
    bed = Bed(SMALL)
    with pytest.raises(ValueError, match=r"Invalid out: its dtype must be one of .*, got torch.float64"):
        TRITON.flatten_gradients(bed.grads, bed.blocks, bed["averaged"].double(), 2)
    with pytest.raises(ValueError, match="Invalid out"):
        TRITON.flatten_gradients(bed.grads, bed.blocks, bed["averaged"][1:], 2)
    with pytest.raises(ValueError, match="Invalid partials"):
        TRITON.gradient_norms(bed.grads, bed.blocks, torch.empty(bed.blocks.blocks, device="meta"))
    with pytest.raises(ValueError, match="Invalid partials"):
        TRITON.gradient_norms(bed.grads, bed.blocks, torch.empty(2 * bed.blocks.blocks)[::2])
