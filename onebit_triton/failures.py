"""Who is missing when a collective fails: survivors check in at the group's key-value store and name those who do not.

gloo's own error names an address or nobody. Nothing of this runs in a step that goes well: a wait that lasts longer
than `LOOK_EVERY` looks whether another rank has given up, and only a failure starts the roll call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from threading import Thread
from typing import Any, Protocol

LOOK_EVERY = timedelta(seconds=0.5)
"""How long a rank waits for a collective before it looks, again and again, whether others have given up."""

ANSWER_SECONDS, ANSWER_AT_MOST = 3.0, 60.0
"""How long ranks have to answer a roll call, besides twice the time of a step: a rank may still be computing. And no
longer than so many seconds."""

STORE_SECONDS = 2.0
"""How long the store may take for one answer. One whose host is stopped would keep its clients for ever."""

CALLED = "called"
"""Key of the store that starts a roll call. Its value is the error of the rank that was first."""

_doing: ContextVar[tuple[str, ...]] = ContextVar("doing", default=())


class Store(Protocol):
    """What is used of torch.distributed's stores."""

    def set(self, key: str, value: str, /) -> Any:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Read a value that is there."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all of these keys are there."""

    def delete_key(self, key: str, /) -> bool:
        """Remove a key."""


class Pending(Protocol):
    """A started collective of torch.distributed."""

    def wait(self, timeout: timedelta = ...) -> Any:
        """Wait, so long if given; raises if that was too short, or if the collective failed."""

    def is_completed(self) -> bool:
        """Whether it has succeeded or failed."""


class LostRankError(RuntimeError):
    """A collective failed because other ranks are not there. The group is broken: end, and start from a checkpoint.

    Attributes:
        ranks: ranks of the group that are missing, or have raised; empty if all answered.
    """

    def __init__(self, message: str, ranks: Sequence[int]) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


@contextmanager
def doing(name: str) -> Iterator[None]:
    """Say what is being done meanwhile, for whoever fails there; nests."""
    token = _doing.set((*_doing.get(), name))
    try:
        yield
    finally:
        _doing.reset(token)


class Watch:
    """Waits for collectives of one group, and finds out who is missing when one fails.

    Args:
        world: ranks of the default group that are the ranks of this one.
        rank: this process's rank in the group.
        store: the group's key-value store; None for a single process.
        host: the rank of the default group that hosts it, if one does.

    Attributes:
        stage: of the optimizer; steps: how many it has taken. Both only for messages.
    """

    def __init__(self, world: Sequence[int], rank: int, store: Store | None, host: int | None) -> None:
        self.stage, self.steps = "warmup", 0
        self._world, self._rank, self._store, self._host = world, rank, store, host
        self._asking: Thread | None = None
        self._store_lost = self._noted = False
        self._ended: float | None = None
        self._step_seconds = 0.0
        self._failed: tuple[str, list[int]] | None = None

    def end_step(self, steps: int) -> None:
        """Note that so many steps are done, and how long the last one took, with all that belongs to it."""
        now = time.monotonic()
        if self._ended is not None:
            self._step_seconds = now - self._ended
        self.steps, self._ended = steps, now

    def where(self) -> str:
        """What this rank is doing."""
        first, *rest = _doing.get() or ("a collective",)
        if first == "step":
            return f"step {self.steps + 1} ({', '.join([self.stage, *rest])})"
        return f"{', '.join([first, *rest])} (after step {self.steps})"

    @contextmanager
    def guard(self, name: str) -> Iterator[None]:
        """Say what is being done, and leave word for the other ranks if it raises on this one."""
        outermost = not _doing.get()
        with doing(name):
            try:
                yield
            except LostRankError:
                raise
            except BaseException as error:
                if outermost:
                    self._note(f"raised {type(error).__name__} in {self.where()}: {error}")
                raise
        if outermost and self._noted:
            self._note(None)

    def _note(self, text: str | None) -> None:
        """Leave an answer for a roll call that may come, or take it back."""
        key = f"answer/{self._rank}"
        self._ask(lambda store: store.set(key, text) if text else store.delete_key(key), STORE_SECONDS)
        self._noted = text is not None

    def _ask(self, question: Callable[[Store], object], seconds: float) -> bool:
        """Whether the store answered in time. It is not asked while it owes an answer, nor after an error."""
        store = self._store
        if store is None or self._store_lost or (self._asking is not None and self._asking.is_alive()):
            return False

        def run() -> None:
            try:
                question(store)
            except Exception:
                self._store_lost = True

        self._asking = Thread(target=run, daemon=True)
        self._asking.start()
        self._asking.join(seconds)
        return not (self._asking.is_alive() or self._store_lost)

    def wait(self, work: Pending, on_cpu: bool) -> None:
        """Wait for a collective.

        Args:
            work: the collective.
            on_cpu: whether its tensors are. Then waiting blocks, and is done in pieces: between them Python runs
                handlers of signals, and a rank learns that another has given up which it does not exchange with itself.

        Raises:
            LostRankError: if it failed, from its own error.
        """
        if on_cpu:
            with suppress(RuntimeError):
                work.wait(LOOK_EVERY)
                return
            while not work.is_completed():
                self._look()
                with suppress(RuntimeError):
                    work.wait(LOOK_EVERY)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._named(str(error)) from error

    def _look(self) -> None:
        """Give up if another rank has."""
        first: list[str] = []

        def look(store: Store) -> None:
            if store.check([CALLED]):
                first.append(store.get(CALLED).decode())

        if self._ask(look, STORE_SECONDS) and first:
            raise self._named(first[0]) from RuntimeError(first[0])

    def _named(self, error: str) -> LostRankError:
        """The error to raise, after a roll call; later failures have the answers of the first."""
        if self._failed is None:
            self._failed = self._call_roll(error.strip())
        return LostRankError(*self._failed)

    def _call_roll(self, error: str) -> tuple[str, list[int]]:
        """Check in, wait for the others, and say who is missing: a message, and their ranks."""
        where = self.where()
        seconds = min(ANSWER_SECONDS + 2 * self._step_seconds, ANSWER_AT_MOST)
        answers = self._answers(where, error, seconds)
        missing = [r for r in range(len(self._world)) if answers and r not in answers]
        raised = [r for r, answer in answers.items() if answer.startswith("raised")]
        causes = [f"{self._label(r)} {answers[r]}" for r in raised]
        if missing:
            some = ", ".join(map(self._label, missing[:10])) + f" and {len(missing) - 10} more" * (len(missing) > 10)
            causes.append(f"{some} did not answer within {seconds:.0f} s: dead, stalled, or busy elsewhere")
        if not answers:
            causes.append("the store of the process group does not answer, so that nobody can be asked")
            if self._host is not None:
                causes[-1] += f"; rank {self._host} of all hosts it, so that one is dead or stalled"
                missing = [r for r, everywhere in enumerate(self._world) if everywhere == self._host]
        if not causes:
            causes.append("all ranks answer: a connection broke, or one came later than the group's timeout")
        elsewhere = [f"{self._label(r)} {a}" for r, a in answers.items() if a.startswith("is in") and a[6:] != where]
        causes += elsewhere[:5]
        return (
            f"{self._label(self._rank).capitalize()} lost contact in {where}: {'; '.join(causes)}. The process group "
            "is broken, and what this process holds may be half a step, so do not save it: end all processes and start "
            f"again from the last checkpoint, as torchrun --max-restarts does. What failed first: {error}"
        ), sorted(missing + raised)

    def _answers(self, where: str, error: str, seconds: float) -> dict[int, str]:
        """What each rank answers that does within so many seconds; nothing if the store does not."""
        me, keys, answers = self._rank, [f"answer/{rank}" for rank in range(len(self._world))], {}

        def check_in(store: Store) -> None:
            if not store.check([CALLED]):
                store.set(CALLED, f"{self._label(me)} in {where}: {error}")
            store.set(keys[me], f"is in {where}")
            store.check([CALLED])  # a store that has died takes the first message without an error

        def read(store: Store) -> None:
            _wait_for(store, keys, seconds)
            answers.update({rank: store.get(key).decode() for rank, key in enumerate(keys) if store.check([key])})
            # The process that hosts the store must not end before all have read.
            store.set(f"read/{me}", "")
            reading = [f"read/{rank}" for rank, answer in answers.items() if answer.startswith("is in")]
            _wait_for(store, reading, STORE_SECONDS)

        if self._ask(check_in, STORE_SECONDS):
            self._ask(read, seconds + 2 * STORE_SECONDS)
        return answers

    def _label(self, rank: int) -> str:
        everywhere = self._world[rank]
        return f"rank {rank}" if everywhere == rank else f"rank {rank} of the group (rank {everywhere} of all)"


def _wait_for(store: Store, keys: list[str], seconds: float) -> None:
    """Wait until all keys are there, or the time is over."""
    deadline = time.monotonic() + seconds
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(0.05)
