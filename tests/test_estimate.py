"""The predictor: its bytes are those that are counted, its times behave, and what it says pays does."""

from __future__ import annotations

import dataclasses
import inspect
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onebit_triton import OneBitLamb
from onebit_triton.buckets import message_bytes, plan_layout
from onebit_triton.collectives import Communicator, CompressedAllReduce, ring_bytes
from onebit_triton.estimate import BUCKET_ELEMENTS, compressed_bytes, estimate, main

positive = st.floats(1e-6, 1e3)
workloads = st.fixed_dictionaries(
    {
        "parameters": st.integers(1, 10**10),
        "ranks": st.integers(2, 512),
        "compute": positive,
        "optimizer": st.floats(0, 10),
        "compressed_optimizer": st.none() | st.floats(0, 10),
        "latency": st.floats(0, 1e-2),
        "overlap": st.none() | st.floats(0, 1),
    }
)
bandwidths = st.floats(1e5, 1e13)


class Unconnected(Communicator):
    """A communicator of as many ranks as one likes, for counting only."""

    def __init__(self, ranks: int) -> None:
        super().__init__(None)
        self.ranks = ranks


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=8), st.integers(2, 9), st.sampled_from([64, 128]))
def test_bytes_are_those_of_the_exchange(sizes: list[int], ranks: int, block: int) -> None:
    layout = plan_layout([torch.empty(size) for size in sizes], block, 4096, ranks)
    messages = [message_bytes(bucket, block, ranks) for bucket in layout.buckets]
    exchange = CompressedAllReduce(Unconnected(ranks), messages, 0, torch.device("cpu"))
    assert compressed_bytes(layout.padded_elements, ranks, len(layout.buckets)) == exchange.step_bytes


@given(st.integers(0, 10**6), st.integers(2, 9), st.sampled_from([2, 4]))
def test_ring_bytes_are_those_counted(elements: int, ranks: int, element_bytes: int) -> None:
    communicator = Unconnected(ranks)
    communicator.count_all_reduce(torch.empty(elements, dtype={2: torch.float16, 4: torch.float32}[element_bytes]))
    assert ring_bytes(elements, ranks, element_bytes) == communicator.traffic.sent["warmup"]


def test_bucket_size_is_the_default_of_the_optimizer() -> None:
    assert inspect.signature(OneBitLamb).parameters["bucket_elements"].default == BUCKET_ELEMENTS


@given(workloads, bandwidths, st.floats(1, 1e3))
def test_more_bandwidth_is_never_slower(workload: dict, bandwidth: float, factor: float) -> None:
    slow, fast = estimate(bandwidth=bandwidth, **workload), estimate(bandwidth=factor * bandwidth, **workload)
    for name in ("fp32", "fp16", "onebit"):
        assert getattr(fast, name).step <= getattr(slow, name).step * (1 + 1e-12)
        assert getattr(fast, name).sent == getattr(slow, name).sent


@given(workloads, bandwidths)
def test_pays_exactly_below_the_break_even(workload: dict, bandwidth: float) -> None:
    found = estimate(bandwidth=bandwidth, **workload)
    for rival, name in (("fp32", "pays_below_fp32"), ("fp16", "pays_below_fp16")):
        limit = getattr(found, name)
        if limit == math.inf:
            assert found.step_speedup(getattr(found, rival)) >= 1 - 1e-9
        elif limit > 0:
            below, at = (estimate(bandwidth=limit * part, **workload) for part in (0.5, 1))
            assert below.step_speedup(getattr(below, rival)) >= 1 - 1e-9
            assert at.step_speedup(getattr(at, rival)) == pytest.approx(1, rel=1e-6)
        else:
            assert getattr(found, rival).sent <= found.onebit.sent


def test_step_times_by_hand() -> None:
    """8 Mi parameters, 4 ranks, 100 Mbit/s: every term of the model, one after the other."""
    found = estimate(
        8 * 2**20, 4, 1e8, 0.2, optimizer=0.03, compressed_optimizer=0.05, latency=0.001, overlap=0.5, warmup=0.25
    )
    sent = 2 * 3 / 4 * 4 * 8 * 2**20
    assert found.fp32.sent == sent
    assert found.fp32.exchange == pytest.approx(8 * sent / 1e8 + 2 * 6 * 0.001)  # two buckets of DDP
    assert found.fp32.step == pytest.approx(0.2 + 0.03 + found.fp32.exchange - 0.1)
    assert found.fp16.step == pytest.approx(0.2 + 0.03 + 8 * sent / 2 / 1e8 + 0.012 - 0.1)
    assert found.onebit.sent == sent / 32 + 2 * 2 * 3 * 32
    assert found.onebit.step == pytest.approx(0.2 + 0.05 + 8 * found.onebit.sent / 1e8 + 2 * 4 * 0.001)
    mean = 0.25 * found.fp32.step + 0.75 * found.onebit.step
    assert found.training_speedup(found.fp16) == pytest.approx(found.fp16.step / mean)


def test_backward_hides_what_it_can() -> None:
    """A large model's exchange over a fast link disappears behind backward; a small one's does not."""
    large = estimate(10**9, 8, 1e12, compute=1.0)
    assert large.fp32.step == 1.0
    assert large.onebit.step > 1.0
    small = estimate(10**6, 8, 1e12, compute=1.0)
    assert small.fp32.step == 1.0 + small.fp32.exchange


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("parameters", 0),
        ("parameters", 1e6),
        ("ranks", 4.0),
        ("ranks", 1),
        ("bandwidth", 0.0),
        ("bandwidth", math.nan),
        ("compute", -1.0),
        ("optimizer", math.inf),
        ("compressed_optimizer", -0.1),
        ("latency", math.nan),
        ("overlap", 1.5),
        ("warmup", -0.1),
    ],
)
def test_errors_name_the_argument(name: str, value: float) -> None:
    arguments = {"parameters": 10**6, "ranks": 4, "bandwidth": 1e9, "compute": 0.1} | {name: value}
    with pytest.raises(ValueError, match=f"^Invalid {name}={value}. Must be "):
        estimate(**arguments)


def command_line(**changed: str) -> list[str]:
    options = {"parameters": "340e6", "ranks": "16", "bandwidth": "1e9", "compute": "0.25"} | changed
    return [f"--{name}={value}" for name, value in options.items()]


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(command_line())
    slow = capsys.readouterr().out
    assert slow.count("compression pays here") == 2
    main(command_line(bandwidth="1e13"))
    assert capsys.readouterr().out.count("compression does not pay here") == 2
    with pytest.raises(SystemExit):
        main(command_line(ranks="1"))
    assert "Invalid ranks=1" in capsys.readouterr().err


def test_command_runs_as_a_module() -> None:
    command = [sys.executable, "-W", "error", "-m", "onebit_triton.estimate", *command_line()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "1-bit" in done.stdout


def test_estimates_are_plain_data() -> None:
    found = estimate(10**6, 4, 1e9, 0.1)
    assert dataclasses.asdict(found)["onebit"]["sent"] == found.onebit.sent
