"""How long the last step took, and how much of that was waiting for other ranks; measuring waits for no device."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch


class Work(Protocol):
    """A started collective."""

    def wait(self) -> object:
        """Order what follows after it."""


class Clock:
    """Stamps of one step: its start, before and after each wait, its end.

    On a CPU a stamp is the host's time. On CUDA it is an event on the current stream, which costs the host about a
    microsecond and the device nothing; events are made once and recorded anew in each step. Stamps are turned into
    seconds only when they are read.
    """

    def __init__(self) -> None:
        self._stamps: list[Any] = []
        self._events: list[Any] = []
        self._on_cuda = self._running = False

    def start(self, on_cuda: bool) -> None:
        """Begin a step; the last one is forgotten."""
        self._stamps.clear()
        self._on_cuda, self._running = on_cuda, True
        self._stamp()

    def stop(self) -> None:
        """End the step."""
        self._stamp()
        self._running = False

    def wait(self, work: Work) -> object:
        """Wait for a collective; within a step the time counts as exchange."""
        if not self._running:
            return work.wait()
        self._stamp()
        result = work.wait()
        self._stamp()
        return result

    def _stamp(self) -> None:
        if not self._on_cuda:
            self._stamps.append(time.perf_counter())
            return
        if len(self._stamps) == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))
        event = self._events[len(self._stamps)]
        event.record()
        self._stamps.append(event)

    def read(self) -> tuple[float, float]:
        """Seconds of the last step that were spent waiting for collectives, and all its others (synchronises)."""
        if self._running or not self._stamps:
            return 0.0, 0.0
        waits = self._stamps[1:-1]
        if self._on_cuda:
            self._stamps[-1].synchronize()
        waited = sum((self._seconds(a, b) for a, b in zip(waits[::2], waits[1::2], strict=True)), 0.0)
        return waited, self._seconds(self._stamps[0], self._stamps[-1]) - waited

    def _seconds(self, first: Any, second: Any) -> float:
        return first.elapsed_time(second) / 1e3 if self._on_cuda else second - first
