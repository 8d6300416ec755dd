"""Bytes are counted where they are sent: they equal the formula, and what the kernel saw the process write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onebit_triton import OneBitLamb
from onebit_triton.collectives import Communicator, CompressedAllReduce
from onebit_triton.kernels.tables import HEADER_BYTES, Roll

from ..ranks import RankPool
from ..training import gradients, parameters, set_gradients


def written() -> int:
    """Bytes this process has handed to write calls; gloo writes to its sockets with them."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def exchange(rank: int, ranks: int, message_bytes: list[int]) -> dict[str, Any]:
    communicator = Communicator(None)
    wire = CompressedAllReduce(communicator, message_bytes, tag=7, device=torch.device("cpu"))
    for bucket, messages in enumerate(wire.messages):
        for to in range(ranks):
            messages[to].fill_(10 * rank + to + 100 * (bucket % 2))
    for bucket in range(len(message_bytes)):
        wire.send_to_servers(bucket).wait()
        for sender in range(ranks):
            assert (wire.received[bucket][sender] == 10 * sender + rank + 100 * (bucket % 2)).all()
        wire.server[bucket].fill_(rank + 1)
        wire.send_to_workers(bucket).wait()
        for server in range(ranks):
            assert (wire.messages[bucket][server] == server + 1).all()
    return {"sent": sum(communicator.traffic.sent.values()), "step_bytes": wire.step_bytes}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_exchange_moves_and_counts_messages(ranks: RankPool, n: int) -> None:
    sizes = [24, 16 + 128, 40]
    for seen in ranks(n, exchange, sizes):
        assert seen["sent"] == seen["step_bytes"] == 2 * (n - 1) * sum(sizes)


def count_step(rank: int, ranks: int, elements: int) -> dict[str, int]:
    params = parameters(shapes=[(elements,)])
    optimizer = OneBitLamb(params, freeze_step=2, backend="torch", bucket_elements=elements // 2)
    result = {}
    for step in range(4):
        set_gradients(params, gradients(step, rank, params))
        before, io = sum(optimizer.bytes_sent.values()), written()
        optimizer.step()
        result[f"counted{step}"] = sum(optimizer.bytes_sent.values()) - before
        result[f"written{step}"] = written() - io
        assert optimizer.metrics()["bytes_sent_last_step"] == result[f"counted{step}"]
    return result


@pytest.mark.parametrize("n", [2, 4])
def test_compressed_step_sends_the_formula(ranks: RankPool, n: int) -> None:
    elements = 1024 * 1024
    for seen in ranks(n, count_step, elements):
        for step in (2, 3):
            messages = 2 * (n - 1) * HEADER_BYTES
            assert seen[f"counted{step}"] == 2 * (n - 1) * elements // n // 8 + messages
            # gloo adds a few dozen bytes to each of its messages
            assert seen[f"counted{step}"] <= seen[f"written{step}"] <= 1.05 * seen[f"counted{step}"]
        assert seen["counted1"] == 2 * (n - 1) * (elements + n * len(Roll)) * 4 // n
        assert seen["written1"] == pytest.approx(seen["counted1"], rel=0.05)


def test_sixteen_times_less_than_half_precision(ranks: RankPool) -> None:
    seen = ranks(2, count_step, 1024 * 1024)[0]
    assert 31.5 < seen["counted1"] / seen["counted2"] <= 32


def memory(rank: int, ranks: int) -> dict[str, float]:
    params = parameters(shapes=[(1024, 512), (1024, 512)])
    optimizer = OneBitLamb(params, freeze_step=2, backend="torch")
    for step in range(4):
        set_gradients(params, gradients(step, rank, params))
        optimizer.step()
    metrics = optimizer.metrics()
    return {"per_element": metrics["state_bytes"] / metrics["padded_elements"]}


def test_state_fits_its_budget(ranks: RankPool) -> None:
    for seen in ranks(4, memory):
        assert 12.25 + 4 / 4 < seen["per_element"] <= 12.5 + 4 / 4


def live_bytes(rank: int, ranks: int) -> dict[str, float]:
    """The budget again, from the tensors that are alive rather than from what the optimizer says it holds."""
    import gc

    def alive() -> dict[int, int]:
        gc.collect()
        tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.layout is torch.strided]
        storages = [tensor.untyped_storage() for tensor in tensors]  # only strided tensors have one
        return {storage.data_ptr(): storage.nbytes() for storage in storages}

    params = parameters(shapes=[(1024, 512), (1024, 512)])
    before = alive()  # this process has run other tests
    optimizer = OneBitLamb(params, freeze_step=2, backend="torch")
    for step in range(4):
        set_gradients(params, gradients(step, rank, params))
        optimizer.step()
    optimizer.zero_grad()
    storages = {at: size for at, size in alive().items() if at not in before}
    return {"live": sum(storages.values()), "elements": optimizer.metrics()["padded_elements"]}


def test_nothing_else_is_kept(ranks: RankPool) -> None:
    for seen in ranks(4, live_bytes):
        assert np.isclose(seen["live"] / seen["elements"], 13.5, atol=0.2)
