"""Gradients averaged in 8 bits: what is rounded, what rides along, what is sent; without DDP and by its hook."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from onebit_triton import OneBitLamb
from onebit_triton.collectives import Communicator
from onebit_triton.eight_bits import BLOCK, DTYPE, EightBitAllReduce, decode, encode
from onebit_triton.kernels.tables import Roll

from ..ranks import RankPool
from ..training import gradients, parameters, set_gradients, vector
from .test_ddp import train


def rounded(values: torch.Tensor) -> torch.Tensor:
    """After one rounding, fp32, like values [elements], in blocks from their start."""
    blocks = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    codes, scales = torch.empty_like(blocks, dtype=DTYPE), torch.empty(blocks.shape[0], 1)
    encode(blocks, codes, scales)
    return decode(codes, scales).view(-1)[: values.numel()]


def shares(rank: int, elements: int) -> torch.Tensor:
    """Values over eight decades from block to block."""
    values = torch.randn(elements, generator=torch.Generator().manual_seed(rank))
    return values * 10.0 ** (torch.arange(elements) // BLOCK % 9 - 6)


def test_rounding_is_relative() -> None:
    values = shares(0, 9 * BLOCK)
    scale = values.view(-1, BLOCK).abs().amax(1, keepdim=True).expand(-1, BLOCK).reshape(-1)
    normal = values.abs() > scale * 2.0**-6 / 448
    error = (rounded(values) - values).abs()
    assert normal.float().mean() > 0.99
    assert (error[normal] <= values[normal].abs() / 16).all()
    assert (error[~normal] <= scale[~normal] * 2.0**-10 / 448 * 1.001).all()


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 3e38, -3e38])
def test_extremes_stay_finite(value: float) -> None:
    values = torch.zeros(BLOCK)
    values[3] = value
    got = rounded(values)
    assert got.isfinite().all()
    assert abs(float(got[3]) - value) <= max(abs(value) / 16, 1e-38)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(value: float) -> None:
    values = torch.ones(2 * BLOCK)
    values[BLOCK] = value
    assert not rounded(values)[BLOCK].isfinite()
    assert torch.equal(rounded(values)[:BLOCK], values[:BLOCK])


def add_up(rank: int, ranks: int, elements: int) -> tuple[np.ndarray, np.ndarray, int]:
    communicator = Communicator(None)
    reduction = EightBitAllReduce(communicator, elements, 2, torch.device("cpu"))
    out = torch.empty(elements)
    for _ in range(2):  # the buffers are used again
        reduction.start(shares(rank, elements), torch.tensor([1.5, float(rank)]))
        reduction.add_up()
        numbers = reduction.finish(out)
    return out.numpy(), numbers.clone().numpy(), communicator.traffic.sent["warmup"] // 2


@pytest.mark.parametrize(("n", "elements"), [(1, 300), (2, 0), (3, 1), (3, 3000), (4, 4 * BLOCK)])
def test_sum_over_ranks(ranks: RankPool, n: int, elements: int) -> None:
    """Every rank gets the same: shares are rounded, added in rank order, and their sum is rounded once more."""
    total = rounded(shares(0, elements))
    for rank in range(1, n):
        total = total + rounded(shares(rank, elements))
    chunk = max(1, -(-elements // (n * BLOCK))) * BLOCK
    for out, numbers, sent in ranks(n, add_up, elements):
        np.testing.assert_array_equal(out, rounded(total).numpy())
        np.testing.assert_array_equal(numbers, [[1.5, rank] for rank in range(n)])
        assert sent == (n - 1) * (2 * (chunk + chunk // BLOCK * 4) + 2 * 4)


def average(rank: int, ranks: int) -> np.ndarray:
    params = parameters()
    optimizer = OneBitLamb(
        params, lr=0.01, freeze_step=9, gradient_dtype=DTYPE, backend="torch", block_elements=BLOCK,
        bucket_elements=BLOCK,
    )  # fmt: skip
    for step in range(4):
        set_gradients(params, gradients(step, rank, params))
        optimizer.step()
    return vector(params)


def test_what_is_averaged(ranks: RankPool) -> None:
    """Gradients are divided before: LAMB on the rounded sum takes the very same steps. A bucket per tensor here."""
    params = parameters()
    optimizer = OneBitLamb(params, lr=0.01, freeze_step=9, backend="torch", block_elements=BLOCK)
    for step in range(4):
        halves = [[rounded(grad.view(-1) / 2) for grad in gradients(step, rank, params)] for rank in range(2)]
        averaged = [rounded(a + b).view_as(p) for a, b, p in zip(*halves, params, strict=True)]
        set_gradients(params, averaged)
        optimizer.step()
    for seen in ranks(2, average):
        np.testing.assert_array_equal(seen, vector(params))


@pytest.mark.parametrize("mode", ["attach", "plain"])
@pytest.mark.parametrize("micro", [1, 2])
def test_training(ranks: RankPool, mode: str, micro: int) -> None:
    """Replicas stay alike, compression sends what it always does, and warmup is close to that in full precision."""
    short, long = 4, 7
    whole = ranks(2, train, mode, long, micro, {})[0]
    coded = ranks(2, train, mode, long, micro, {"gradient_dtype": DTYPE})
    np.testing.assert_array_equal(coded[0]["params"], coded[1]["params"])
    assert coded[0]["sent"][5:] == whole["sent"][5:]
    blocks = -(-coded[0]["elements"] // (2 * BLOCK))
    assert coded[0]["sent"][1] == 2 * blocks * (BLOCK + 4) + len(Roll) * 4
    whole, coded = (ranks(2, train, mode, short, micro, o)[0] for o in ({}, {"gradient_dtype": DTYPE}))
    assert 0 < np.median(np.abs(coded["params"] - whole["params"])) < 3e-3


def spoilt(rank: int, ranks: int) -> tuple[int, str]:
    params = parameters()
    optimizer = OneBitLamb(params, lr=0.01, freeze_step=9, gradient_dtype=DTYPE, backend="torch")
    for step in range(3):
        grads = gradients(step, rank, params)
        if step == rank == 1:
            grads[3].view(-1)[7] = float("inf")
        set_gradients(params, grads)
        optimizer.step()
    skipped = optimizer.metrics()["skipped_steps"]
    optimizer.param_groups[0]["lr"] = 0.01 + 0.01 * rank
    try:
        optimizer.step()
    except RuntimeError as error:
        return skipped, str(error)
    return skipped, ""


def test_ranks_still_agree(ranks: RankPool) -> None:
    """An overflow on one rank skips the step on both; a rate that is wrong on one is an error on both."""
    for skipped, error in ranks(2, spoilt):
        assert skipped == 1
        assert "lr" in error
        assert "rank 1" in error
