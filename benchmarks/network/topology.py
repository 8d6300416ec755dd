"""A network of slow links on one machine: one namespace for each end, joined by a switch, every link shaped.

Everything lies in namespaces of its own, the switch too, so nothing of the machine's own network is touched, and
removing the namespaces removes all of it.

    rank 0's namespace                 the switch's namespace                 rank 1's namespace
      10.0.0.1 eth0  ----- veth -----  port0 [bridge] port1  ----- veth -----  eth0 10.0.0.2
               tbf: sending            tbf: receiving
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

INTERFACE = "eth0"
"""Name of the network interface in the namespace of every rank."""

UNSHAPED = "none"
"""The rate of a link without a shaper."""

MINIMUM_BURST = 64 * 1024
"""Bytes that may pass at once. Larger ones would let short messages through unshaped."""

TIMER_SLACK = 1e-3
"""Seconds that a shaper's timer may be late on a busy machine without loss of rate: it can only save up a burst."""

QUEUE = "50ms"
"""How long a packet may wait in a shaper before it is dropped."""

CAPABILITIES = 1 << 12 | 1 << 21
"""NET_ADMIN and SYS_ADMIN: root in a container often has neither."""

_numbers = itertools.count()


def missing() -> str | None:
    """Why networks cannot be made here; None if they can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces exist on Linux only, this is {sys.platform}"
    for command in ("ip", "tc"):
        if shutil.which(command) is None:
            return f"the command {command} is not installed; it belongs to iproute2"
    status = Path("/proc/self/status").read_text()
    held = int(re.search(r"^CapEff:\s*(\w+)$", status, re.MULTILINE)[1], 16)
    if held & CAPABILITIES != CAPABILITIES:
        return "network namespaces need root, with the capabilities NET_ADMIN and SYS_ADMIN"
    return None


def bits_per_second(rate: str) -> float:
    """Read a rate such as 100mbit or 2.5gbit; `UNSHAPED` is infinite.

    Raises:
        ValueError: if it is none.
    """
    if rate == UNSHAPED:
        return float("inf")
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    if match is None or float(match[1]) == 0:
        raise ValueError(
            f"Invalid {rate=}. Must be a number above 0 followed by bit, kbit, mbit or gbit, or {UNSHAPED}."
        )
    return float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


class Network:
    """Namespaces of ranks, joined by a switch. Made by `network`."""

    def __init__(self, ranks: int) -> None:
        prefix = f"onebit-{os.getpid()}-{next(_numbers)}"
        self.switch = f"{prefix}-switch"
        self.namespaces = [f"{prefix}-rank{rank}" for rank in range(ranks)]
        self.addresses = [f"10.0.0.{rank + 1}" for rank in range(ranks)]

    def create(self) -> None:
        """Make namespaces, links and the switch."""
        for namespace in (self.switch, *self.namespaces):
            _run("ip", "netns", "add", namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
        _run("ip", "-n", self.switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", self.switch, "link", "set", "switch", "up")
        for namespace, address, port in zip(self.namespaces, self.addresses, self._ports(), strict=True):
            peer = ("peer", "name", INTERFACE, "netns", namespace)
            _run("ip", "-n", self.switch, "link", "add", port, "type", "veth", *peer)
            _run("ip", "-n", self.switch, "link", "set", port, "master", "switch", "up")
            _run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", INTERFACE)
            _run("ip", "-n", namespace, "link", "set", INTERFACE, "up")

    def remove(self) -> None:
        """Kill what runs in the namespaces, and remove them with all that is in them."""
        there = {entry["name"] for entry in json.loads(_run("ip", "-json", "netns", "list") or "[]")}
        for namespace in there.intersection((self.switch, *self.namespaces)):
            for process in _run("ip", "netns", "pids", namespace).split():
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            _run("ip", "netns", "del", namespace)

    def command(self, rank: int) -> list[str]:
        """What to put in front of a command to run it in the namespace of a rank."""
        return ["ip", "netns", "exec", self.namespaces[rank]]

    def shape(self, rate: str) -> None:
        """Limit every link to a rate, in both directions and on both of its ends.

        Raises:
            ValueError: if it is no rate.
        """
        bits = bits_per_second(rate)
        for namespace, device in self._ends():
            if rate == UNSHAPED:
                if self._queue(namespace, device)["kind"] == "tbf":
                    _run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
            else:
                burst = max(MINIMUM_BURST, int(bits / 8 * TIMER_SLACK))
                shaper = ("tbf", "rate", f"{int(bits)}bit", "burst", str(burst), "latency", QUEUE)
                _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shaper)

    def sent(self) -> list[int]:
        """Bytes that each rank has sent so far, counted at its interface: headers and acknowledgements included."""
        links = (_run("ip", "-n", n, "-json", "-s", "link", "show", INTERFACE) for n in self.namespaces)
        return [json.loads(link)[0]["stats64"]["tx"]["bytes"] for link in links]

    def dropped(self) -> int:
        """Packets that shapers have dropped since they were set up: more than a few and the rate is not the limit."""
        return sum(self._queue(namespace, device)["drops"] for namespace, device in self._ends())

    def goodput(self, size: int) -> float:
        """What links really carry, measured with plain sockets: every rank sends to the next at the same time.

        Args:
            size: bytes that every rank sends.

        Returns:
            bit/s of payload, the median over ranks.
        """
        ranks = range(len(self.namespaces))
        script = str(Path(__file__).with_name("transfer.py"))
        processes = [
            subprocess.Popen(
                [*self.command(r), sys.executable, script, self.addresses[r], self.addresses[r - 1], str(size)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for r in ranks
        ]
        return statistics.median(float(process.communicate(timeout=120)[0]) for process in processes)

    def _ports(self) -> list[str]:
        return [f"port{rank}" for rank in range(len(self.namespaces))]

    def _ends(self) -> Iterator[tuple[str, str]]:
        yield from ((namespace, INTERFACE) for namespace in self.namespaces)
        yield from ((self.switch, port) for port in self._ports())

    def _queue(self, namespace: str, device: str) -> dict[str, Any]:
        return json.loads(_run("tc", "-n", namespace, "-s", "-json", "qdisc", "show", "dev", device))[0]


@contextmanager
def network(ranks: int) -> Iterator[Network]:
    """Make a network of unshaped links for the length of a with block.

    It is removed whatever ends the block: an exception, Ctrl-C, or SIGTERM, which raises SystemExit meanwhile.

    Args:
        ranks: number of links, from 1 to 250.

    Raises:
        ValueError: for a bad number.
        RuntimeError: saying what is missing here, or what ip or tc answered.
    """
    if not 1 <= ranks <= 250:
        raise ValueError(f"Invalid {ranks=}. Must be from 1 to 250.")
    if reason := missing():
        raise RuntimeError(f"Cannot emulate a network: {reason}.")
    made = Network(ranks)
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        made.create()
        yield made
    finally:
        # A second Ctrl-C must not leave half of it behind.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        made.remove()
        signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _run(*command: str) -> str:
    """Output of a command.

    Raises:
        RuntimeError: with what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
