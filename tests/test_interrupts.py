"""When handlers of signals run."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from onebit_triton.interrupts import SIGNALS, signals_deferred

CAME: list[str] = []


def receive(*numbers: signal.Signals) -> None:
    """Have these signals arrive in the midst of a call; then it is done."""
    with signals_deferred():
        for number in numbers:
            signal.raise_signal(number)
        CAME.append("done")


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    CAME.clear()
    for number in SIGNALS:
        signal.signal(number, lambda number, frame: CAME.append(signal.Signals(number).name))
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_handlers_run_at_the_end_each_once() -> None:
    with signals_deferred():
        for number in SIGNALS:
            signal.raise_signal(number)
        assert CAME == []
    assert sorted(CAME) == sorted(number.name for number in SIGNALS)
    signal.raise_signal(signal.SIGTERM)
    assert CAME[4:] == ["SIGTERM"], "the handlers are back"


def test_a_second_signal_is_handled_at_once() -> None:
    with signals_deferred():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        assert CAME == []
        signal.raise_signal(signal.SIGTERM)
        assert CAME == ["SIGTERM"]
    assert CAME == ["SIGTERM", "SIGUSR1"]


def test_an_interrupt_is_raised_at_the_end_and_twice_at_once() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        receive(signal.SIGINT)
    assert CAME == ["done"]
    with pytest.raises(KeyboardInterrupt):
        receive(signal.SIGINT, signal.SIGINT)
    assert CAME == ["done"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_raises_keeps_no_other_from_running() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        receive(signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)
    assert CAME[0] == "done"
    assert sorted(CAME[1:]) == ["SIGTERM", "SIGUSR1"]


def test_an_error_within_does_not_keep_a_handler_from_running() -> None:
    def fail() -> None:
        with signals_deferred():
            signal.raise_signal(signal.SIGTERM)
            raise ValueError("within")

    with pytest.raises(ValueError, match="within"):
        fail()
    assert CAME == ["SIGTERM"]


def test_nested_calls_are_one() -> None:
    with signals_deferred():
        with signals_deferred():
            signal.raise_signal(signal.SIGTERM)
        assert CAME == []
        signal.raise_signal(signal.SIGTERM)
        assert CAME == ["SIGTERM"], "the second, of the whole"


def test_what_is_not_a_function_is_left_alone() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with signals_deferred():
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN


def test_a_handler_set_within_stays() -> None:
    with signals_deferred():
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN


def test_other_threads_may_step() -> None:
    ended = []

    def work() -> None:
        with signals_deferred():
            ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ended == [True]
