"""Properties of sign planes and of the lazy error, for any input."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from onebit_triton.kernels.backends import Passes
from onebit_triton.kernels.planes_reference import (
    block_planes,
    header,
    keep_mask,
    lazy_error,
    masked_zero,
    pack_planes,
    planes,
    unpack_planes,
)
from onebit_triton.kernels.tables import HEADER_BYTES, Hyper, Rate

from .bed import TORCH, TRITON, Bed, Case, check, numpy_planes

quick = settings(deadline=None, max_examples=50, derandomize=True, database=None)
slow = settings(quick, max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])

BLOCKS = st.sampled_from([64, 128, 256])
FLOATS = st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, 1e-45, -1e-45])


@st.composite
def values(draw: st.DrawFn) -> Tensor:
    """fp32 [blocks, B]."""
    shape = (draw(st.integers(1, 4)), draw(BLOCKS))
    return torch.from_numpy(draw(hnp.arrays(np.float32, shape, elements=FLOATS)))


@st.composite
def packed(draw: st.DrawFn) -> Tensor:
    """Planes, uint8 [blocks, B/8]."""
    shape = (draw(st.integers(1, 6)), draw(BLOCKS) // 8)
    return torch.from_numpy(draw(hnp.arrays(np.uint8, shape)))


@quick
@given(values())
def test_planes_are_the_wire_format(x: Tensor) -> None:
    assert pack_planes(x).flatten().tolist() == numpy_planes(x.flatten(), x.shape[1]).tolist()


@quick
@given(packed(), st.floats(2**-100, 2**100, width=32))
def test_packing_inverts_unpacking(bits: Tensor, scale: float) -> None:
    x = unpack_planes(bits, torch.full((bits.shape[0], 1), scale))
    assert torch.equal(pack_planes(x), bits)
    assert torch.equal(x.abs(), torch.full_like(x, scale))


@quick
@given(values())
def test_unpacking_gives_back_the_signs(x: Tensor) -> None:
    signs = unpack_planes(pack_planes(x), torch.ones(x.shape[0], 1))
    assert torch.equal(signs, torch.where(x < 0, -1.0, 1.0))


@quick
@given(st.integers(1, 4), st.integers(1, 3), BLOCKS, st.integers(0, 2**32 - 1))
def test_blocks_of_messages(ranks: int, chunk_blocks: int, block: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    size = HEADER_BYTES + chunk_blocks * block // 8
    messages = torch.randint(0, 256, (ranks, size), generator=random, dtype=torch.uint8)
    header(messages, 0).copy_(torch.arange(1.0, ranks + 1))
    found, scale = block_planes(messages, block)
    for number in range(ranks * chunk_blocks):
        rank, inside = divmod(number, chunk_blocks)
        start = HEADER_BYTES + inside * block // 8
        assert torch.equal(found[number], messages[rank, start : start + block // 8])
        assert scale[number].item() == rank + 1


@quick
@given(values(), values())
def test_marks_stay_and_none_appear(old: Tensor, new: Tensor) -> None:
    size = min(old.numel(), new.numel())
    old, new = old.flatten()[:size], new.flatten()[:size]
    kept = keep_mask(masked_zero(old), old, new)
    assert torch.equal(masked_zero(kept), masked_zero(old))
    assert torch.equal(kept[~masked_zero(old)], new[~masked_zero(old)])


@quick
@given(hnp.arrays(np.float32, 64, elements=st.integers(-(2**20), 2**20)), st.integers(0, 2**20))
def test_lazy_error_and_what_was_sent_make_x(x: np.ndarray, scale: int) -> None:
    """Exactly, on numbers whose sums fp32 holds exactly."""
    given, sent = torch.from_numpy(x), torch.tensor([float(scale)])
    assert torch.equal(lazy_error(given, sent) + torch.where(given >= 0, sent, -sent), given)


@quick
@given(hnp.arrays(np.float32, 64, elements=st.floats(-(2**60), 2**60, width=32)), st.floats(0, 2**60, width=32))
def test_lazy_error_rounds_once(x: np.ndarray, scale: float) -> None:
    given, sent = torch.from_numpy(x) + 0.0, torch.tensor([scale])  # a negative zero is masked, and has no error
    exact = given.double() - torch.where(given >= 0, sent, -sent).double()
    error = (lazy_error(given, sent).double() - exact).abs()
    assert (error <= exact.abs() * 2**-24 * (1 + 1e-6) + 2**-149).all()


GRADIENTS = st.lists(hnp.arrays(np.float32, 64, elements=st.integers(-512, 512)), min_size=1, max_size=6)


def check_worker_telescopes(passes: Passes, gradients: list[np.ndarray], scale: int) -> None:
    """What was sent and the last error add up to all gradients, exactly: integers, b1 = 0, s_j = 1."""
    bed = Bed(Case("telescope", (64,)))
    bed["hyper"][0, Hyper.BETA1], bed["hyper"][0, Hyper.ONE_MINUS_BETA1] = 0.0, 1.0
    bed["rates"][0, Rate.SCALING] = 1.0
    bed["x"].zero_()
    bed["x_scale"].zero_()
    sent = torch.zeros(64)
    for step, gradient in enumerate(gradients):
        bed["grad.0"].copy_(torch.from_numpy(gradient))
        passes.compress_momentum(
            bed.grads, bed.blocks, bed["x"], bed["x_scale"], bed["old"], None, bed["hyper"], bed["rates"],
            bed["clip"], bed["new"], bed["partials2"],
        )  # fmt: skip
        bed["x_scale"].fill_(scale + step)
        sent += unpack_planes(planes(bed["new"]).view(1, -1), bed["x_scale"].view(1, 1)).flatten()
    assert torch.equal(sent + lazy_error(bed["x"], bed["x_scale"]), torch.from_numpy(np.sum(gradients, axis=0)))


def check_server_telescopes(passes: Passes, seed: int, scale: int, steps: int) -> None:
    """What was sent back and the last error add up to the mean of all that was received, exactly."""
    bed = Bed(Case("telescope", (128,), ranks=2))
    bed["y"].zero_()
    bed["y_scale"].zero_()
    random = torch.Generator().manual_seed(seed)
    received, sent = torch.zeros(64), torch.zeros(64)
    for step in range(steps):
        bed["received:planes"].copy_(torch.randint(0, 256, (2, 8), generator=random))
        header(bed["received"], 0).copy_(torch.randint(0, 256, (2,), generator=random))
        for rank in range(2):
            one = bed["received"][rank : rank + 1]
            received += unpack_planes(planes(one), header(one, 0).view(1, 1)).flatten() / 2
        passes.reduce_chunk(
            bed["received"], bed["y"], bed["y_scale"], bed["decision"], bed["message"], bed["chunk_partials"], 64
        )
        bed["y_scale"].fill_(scale + step)
        sent += unpack_planes(bed["message"][HEADER_BYTES:].view(1, -1), bed["y_scale"].view(1, 1)).flatten()
    assert torch.equal(sent + lazy_error(bed["y"], bed["y_scale"]), received)


@quick
@given(GRADIENTS, st.integers(0, 512))
def test_worker_error_of_the_twin_telescopes(gradients: list[np.ndarray], scale: int) -> None:
    check_worker_telescopes(TORCH, gradients, scale)


@slow
@given(GRADIENTS, st.integers(0, 512))
def test_worker_error_of_the_kernel_telescopes(gradients: list[np.ndarray], scale: int) -> None:
    check_worker_telescopes(TRITON, gradients, scale)


@quick
@given(st.integers(0, 2**32 - 1), st.integers(0, 512), st.integers(1, 8))
def test_server_error_of_the_twin_telescopes(seed: int, scale: int, steps: int) -> None:
    check_server_telescopes(TORCH, seed, scale, steps)


@slow
@given(st.integers(0, 2**32 - 1), st.integers(0, 512), st.integers(1, 6))
def test_server_error_of_the_kernel_telescopes(seed: int, scale: int, steps: int) -> None:
    check_server_telescopes(TRITON, seed, scale, steps)


@pytest.mark.filterwarnings("ignore:overflow")
@settings(slow, max_examples=8)
@given(
    sizes=st.lists(st.integers(1, 150), min_size=1, max_size=4).map(tuple),
    block=st.sampled_from([64, 128]),
    ranks=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    shift=st.integers(0, 3),
    seed=st.integers(0, 2**32 - 8),
)
def test_compress_agrees_in_any_layout(
    sizes: tuple[int, ...], block: int, ranks: int, dtype: torch.dtype, shift: int, seed: int
) -> None:
    bed = Bed(Case("any", sizes, block=block, ranks=ranks, dtype=dtype, shift=shift), masks=True, seed=seed)

    def run(passes: Passes, bed: Bed) -> None:
        passes.compress_momentum(
            bed.grads, bed.blocks, bed["x"], bed["x_scale"], bed["old"], None, bed["hyper"], bed["rates"],
            bed["clip"], bed["new"], bed["partials2"],
        )  # fmt: skip

    bed["x"][0] = 0.25  # takes part, so that something changes
    bed["new:planes"].bitwise_not_()
    kernel, _ = check(
        bed, run, ["x", "new", "partials2"], rounded=["partials2"], overwritten=["new:planes", "partials2"]
    )
    assert planes(kernel["new"]).flatten().tolist() == numpy_planes(kernel["x"], block).tolist()
