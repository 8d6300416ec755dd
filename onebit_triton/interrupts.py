"""Signals wait for the end of a call that leaves state half-written in between."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
"""What people and schedulers send to a process that is to save itself, to stop, or both."""


class _Deferred:
    """Stands in for a handler. The first signal waits; what comes then does not, so that what hangs can be ended."""

    def __init__(self, number: int, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._number, self._handler, self._count = number, handler, 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._count += 1
        if self._count > 1:
            self._handler(number, frame)

    def end(self) -> None:
        """Put the handler back, and run it if it is due."""
        present: object = signal.getsignal(self._number)
        if present is self:
            signal.signal(self._number, self._handler)
        if self._count == 1:
            signal.raise_signal(self._number)


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Run handlers of `SIGNALS` that are Python functions at the end: they may save a checkpoint, or raise.

    A second signal of the same kind is handled at once. In the main thread only, where Python runs handlers; within
    another such call nothing changes.
    """
    with ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                handler: Any = signal.getsignal(number)
                if callable(handler) and not isinstance(handler, _Deferred):
                    deferred = _Deferred(number, handler)
                    stack.callback(deferred.end)
                    signal.signal(number, deferred)
        yield
