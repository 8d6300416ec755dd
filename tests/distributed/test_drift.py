"""Replicas that were made to differ by one bit: found, named, and repaired if asked to."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from onebit_triton import OneBitLamb
from onebit_triton.kernels.tables import HEADER_BYTES, Rate

from ..ranks import RankPool
from ..training import gradients, logged, parameters, set_gradients, vector

Spoil = Callable[[OneBitLamb, list[Any]], None]


def flip(tensor: torch.Tensor, element: int) -> None:
    """Flip the last bit of one element."""
    tensor.view(-1)[element : element + 1].view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).bitwise_xor_(1)


def bucket_of(optimizer: OneBitLamb, param: Any) -> tuple[Any, int]:
    buckets = optimizer._replica.buckets
    return next((b, i) for b in buckets for i, p in enumerate(b.parameters) if p is param)


def spoil_state(key: str, number: int, element: int) -> Spoil:
    def spoil(optimizer: OneBitLamb, params: list[Any]) -> None:
        bucket, row = bucket_of(optimizer, params[number])
        flip(bucket.views(getattr(bucket, key))[row], element)

    return spoil


def spoil_parameter(optimizer: OneBitLamb, params: list[Any]) -> None:
    flip(params[4].data, 100)


def spoil_momentum(optimizer: OneBitLamb, params: list[Any]) -> None:
    """One sign of the momentum that the last exchange left."""
    optimizer._stage.exchange.momentum[0][0, HEADER_BYTES] ^= 1  # type: ignore[union-attr]


def spoil_rates(optimizer: OneBitLamb, params: list[Any]) -> None:
    bucket, row = bucket_of(optimizer, params[2])
    flip(bucket.rates[row], Rate.COEFF)


SPOILS: dict[str, tuple[str, Spoil, str]] = {
    "parameter": ("both", spoil_parameter, "parameter layer.4 of rank 2 is not that of rank 0: element 100 is"),
    "exp_avg": ("warmup", spoil_state("exp_avg", 3, 129), "exp_avg of parameter layer.3 of rank 2 .*: element 129 is"),
    "variance": ("both", spoil_state("exp_avg_sq", 0, 7), "exp_avg_sq of parameter layer.0 of rank 2 .*: element 7 is"),
    "fresh": (
        "compression", spoil_state("exp_avg_sq_fresh", 5, 0),
        "exp_avg_sq_fresh of parameter layer.5 of rank 2 .*: element 0 is",
    ),
    "momentum": ("compression", spoil_momentum, "exp_avg of parameter layer.0 of rank 2 .*: element 0 is"),
    "rates": ("both", spoil_rates, "the layer table of parameter layer.2 of rank 2 .*: element 1 is"),
    "master": ("bf16", spoil_state("master", 1, 4), "the master of parameter layer.1 of rank 2 .*: element 4 is"),
}  # fmt: skip


def drift(rank: int, ranks: int, name: str, at: int, dtype: torch.dtype) -> tuple[str, str, list[str], np.ndarray]:
    """What is said when the last rank's replica is spoilt, what when a check is due, what repair logs, and the end."""
    _, spoil, _ = SPOILS[name]
    params = parameters(dtype)
    named = [(f"layer.{i}", p) for i, p in enumerate(params)]
    optimizer = OneBitLamb(named, lr=0.01, freeze_step=3, check_replicas_every=2, backend="torch", block_elements=64)

    def steps(start: int, stop: int) -> None:
        for step in range(start, stop):
            set_gradients(params, gradients(step, rank, params))
            optimizer.step()

    steps(0, at)
    if rank == ranks - 1:
        spoil(optimizer, params)
    with pytest.raises(RuntimeError, match=r"Replicas have drifted apart.*check_replicas\(repair=True\)") as told:
        optimizer.check_replicas()
    due = ""
    try:
        steps(at, at + 2)
    except RuntimeError as error:
        due = str(error)
    with logged() as records:
        if due:
            optimizer.check_replicas(repair=True)
    optimizer.check_replicas()
    steps(at + 2, at + 6)
    return str(told.value), due, records, vector(params)


CASES = [
    (name, at, torch.bfloat16 if stages == "bf16" else torch.float32)
    for name, (stages, *_) in SPOILS.items()
    for at in {"warmup": [2], "compression": [6], "both": [2, 6], "bf16": [6]}[stages]
]


@pytest.mark.parametrize(("name", "at", "dtype"), CASES, ids=str)
def test_one_bit_is_found_named_and_repaired(ranks: RankPool, name: str, at: int, dtype: torch.dtype) -> None:
    results = ranks(3, drift, name, at, dtype)
    for rank, (told, due, records, params) in enumerate(results):
        assert told == results[0][0], "every rank says the same"
        assert re.search(SPOILS[name][2], told), told
        if name in ("parameter", "variance", "master"):  # elsewhere a last bit may round away in a step
            assert due.startswith("Replicas have drifted apart")
        assert len(records) == (rank == 0 and due != "")
        assert all(line.startswith("replicas had drifted apart and were repaired") for line in records)
        np.testing.assert_array_equal(params, results[0][3])


def sound(rank: int, ranks: int, every: int | None) -> int:
    """Bytes sent for nothing but checking, in ten steps of which half are checked, both stages among them."""
    params = parameters()
    optimizer = OneBitLamb(
        params, lr=0.01, freeze_step=5, check_replicas_every=every, backend="torch", block_elements=64
    )
    for step in range(10):
        set_gradients(params, gradients(step, rank, params))
        optimizer.step()
    return sum(optimizer.bytes_sent.values())


def test_sound_replicas_cost_a_small_collective(ranks: RankPool) -> None:
    (with_checks, *_), (without, *_) = ranks(3, sound, 2), ranks(3, sound, None)
    tensors = 6 * 4 * 2 + 6 * 5 * 3  # p, exp_avg, exp_avg_sq, the layer table; in compression exp_avg_sq_fresh too
    assert with_checks - without == 8 * 2 * tensors


def test_one_process_has_nothing_to_compare() -> None:
    assert sound(0, 1, 1) == 0
