"""Emulated networks: links carry what they should, nothing is left behind, and every method trains over them."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.network import METHODS, ranks, topology
from benchmarks.network.topology import Network, bits_per_second, network

needs_network = pytest.mark.skipif(topology.missing() is not None, reason=str(topology.missing()))


def left() -> list[str]:
    """Namespaces of this process that exist."""
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout.split()
    return [name for name in names if name.startswith(f"onebit-{os.getpid()}-")]


def links() -> str:
    """The links of the machine's own network."""
    return subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("rate", "bits"), [("none", float("inf")), ("100mbit", 1e8), ("2.5gbit", 2.5e9), ("9bit", 9)])
def test_rates(rate: str, bits: float) -> None:
    assert bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["", "fast", "100", "0mbit", "-1mbit", "1mbps"])
def test_bad_rates_are_named(rate: str) -> None:
    with pytest.raises(ValueError, match=f"Invalid rate='{rate}'. Must be "):
        bits_per_second(rate)


def test_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "missing", lambda: "there is no such thing")
    with pytest.raises(RuntimeError, match="there is no such thing"), network(2):
        pass


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_says_that_root_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology.shutil, "which", lambda name: f"/sbin/{name}")
    monkeypatch.setattr(topology, "CAPABILITIES", 1 << 62)
    assert "root" in str(topology.missing())


@pytest.mark.parametrize("count", [0, 251])
def test_number_of_ranks_is_checked(count: int) -> None:
    with pytest.raises(ValueError, match=f"Invalid ranks={count}"), network(count):
        pass


@needs_network
def test_bytes_are_counted_and_limited() -> None:
    size = 4_000_000
    with network(2) as made:
        made.shape("200mbit")
        made.shape("100mbit")
        before = made.sent()
        goodput = made.goodput(size)
        sent = [after - earlier for after, earlier in zip(made.sent(), before, strict=True)]
        made.shape("none")
        unshaped = made.goodput(size)
    # Headers take 3 to 5 %, and acknowledgements of what comes the other way as much again at most. No bound from
    # below on the rate: that is the machine's. One from above is the shaper's, with its burst.
    assert all(size < count < 1.15 * size for count in sent)
    assert goodput < 1e8 * (1 + topology.MINIMUM_BURST / size) < unshaped


@needs_network
def test_nothing_is_left_after_an_exception() -> None:
    before = links()
    sleeper: list[subprocess.Popen[bytes]] = []

    def fail(made: Network) -> None:
        assert len(left()) == 3
        sleeper.append(subprocess.Popen([*made.command(1), "sleep", "1000"]))
        made.shape("1mbit")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), network(2) as made:
        fail(made)
    assert left() == []
    assert links() == before
    assert sleeper[0].wait() == -signal.SIGKILL


@needs_network
def test_nothing_is_left_if_making_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "INTERFACE", "a name that is too long")
    with pytest.raises(RuntimeError, match=r"`ip .*` failed: "), network(2):
        pass
    assert left() == []


@needs_network
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_after_a_signal(number: signal.Signals) -> None:
    script = """
import signal, time
from benchmarks.network.topology import network
signal.signal(signal.SIGINT, signal.default_int_handler)  # where jobs in the background ignore it, too
with network(2) as made:
    made.shape("1mbit")
    print(made.switch, flush=True)
    time.sleep(1000)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ranks.ROOT
    )
    with process:
        assert process.stdout is not None
        switch = process.stdout.readline().strip()
        names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert switch in names
        process.send_signal(number)
        try:
            code = process.wait(60)
        finally:
            process.terminate()
        assert code == {signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGINT: -signal.SIGINT}[number]
    names = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"onebit-{process.pid}-" not in names


@needs_network
@pytest.mark.distributed
@pytest.mark.slow
def test_every_method_trains(tmp_path: Path) -> None:
    pytest.importorskip("pytorch_optimizer", reason="the rivals' Lamb needs pytorch-optimizer")
    options = ["--warmup=2", "--lr=0.005", "--backend=torch", "--layers=1", "--width=64", "--heads=2"]
    bytes_sent, losses = {}, {}
    with network(2) as made, ranks.start(made, tmp_path, *options) as processes:
        parameters = processes.ask("parameters")[0]
        for method in METHODS:
            processes.ask("train", method=method, steps=3)
            before = made.sent()
            trained = processes.ask("train", method=method, steps=2)
            bytes_sent[method] = (made.sent()[0] - before[0]) / 2
            assert all(answer["stage"] in (None, "compression") for answer in trained)
            assert all(len(answer["seconds"]) == 2 for answer in trained)
            found = processes.ask("evaluate", method=method, sequences=4)
            assert found[0] == found[1]
            losses[method] = found[0]
        assert len(processes.ask("compute", method="fp32", steps=2)[0]["seconds"]) == 2
        with pytest.raises(RuntimeError, match=r"ended during `no_such_command`:(.|\n)*AttributeError"):
            processes.ask("no_such_command")
    assert all(math.isfinite(loss) for loss in losses.values())
    # At the interface: payload, headers, acknowledgements and the barrier.
    assert 4 * parameters < bytes_sent["fp32"] < 4.5 * parameters
    assert 2 * parameters < bytes_sent["fp16"] < 2.3 * parameters
    assert parameters / 8 < bytes_sent["onebit"] < parameters / 4
    assert bytes_sent["powersgd"] < parameters
    assert left() == []
