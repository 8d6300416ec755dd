"""A signal in the midst of a call waits for its end: what the handler saves then continues exactly."""

from __future__ import annotations

import os
import signal
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from onebit_triton import failures, optimizer
from onebit_triton.stages import replica

from ..ranks import RankPool
from ..training import gradients, parameters, set_gradients, two_groups, vector

SCRIPT = (
    ["step"] * 5 + ["consolidate_errors", "state_dict", "load_state_dict", "check_replicas", "rewarm"] + ["step"] * 3
)
"""The switch is in the third step; `rewarm` warms up for one step."""

MOMENTS = [
    *[(1, name) for name in ("step", "average", "decide", "update")],
    (2, "switch"),
    *[(4, name) for name in ("clip", "compress", "wait for workers", "decide", "serve", "update")],
    *[(number, SCRIPT[number]) for number in range(5, 10)],
    (10, "average"),
]
"""Index in the script, and what is being done."""


class Training:
    """A training that can start anywhere in the script, and in which a signal arrives at a moment.

    Attributes:
        saved: state, parameters and place in the script, as the handler of the signal saved them.
    """

    def __init__(self, rank: int, moment: tuple[int, str] | None = None) -> None:
        self.rank, self.moment = rank, moment
        self.params = parameters()
        self.optimizer = two_groups(self.params, freeze_step=3, max_grad_norm=0.5, backend="torch")
        self.place = 0
        self.saved: list[tuple[Any, ...]] = []

    def save(self, number: int, frame: object) -> None:
        state = self.optimizer.state_dict()
        self.saved.append((state, [p.detach().clone() for p in self.params], self.place + 1))

    def load(self, state: Any, values: list[torch.Tensor], place: int) -> None:
        self.place = place
        with torch.no_grad():
            for param, value in zip(self.params, values, strict=True):
                param.copy_(value)
        self.optimizer.load_state_dict(state)

    def doing(self, name: str) -> Any:
        """What stands in for `failures.doing`."""
        if (self.place, name) == self.moment:
            self.moment = None
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not self.saved, "the handler ran in the midst of it"
        return REAL(name)

    def run(self) -> np.ndarray:
        with (
            mock.patch.object(failures, "doing", self.doing),
            mock.patch.object(optimizer, "doing", self.doing),
            mock.patch.object(replica, "doing", self.doing),
        ):
            while self.place < len(SCRIPT):
                name = SCRIPT[self.place]
                if name == "step":
                    set_gradients(self.params, gradients(self.place, self.rank, self.params))
                arguments: dict[str, list[Any]] = {"rewarm": [1]}
                if name == "load_state_dict":
                    arguments[name] = [self.optimizer.state_dict()]
                getattr(self.optimizer, name)(*arguments.get(name, []))
                self.place += 1
        return vector(self.params)


REAL = failures.doing


def interrupt(rank: int, ranks: int) -> None:
    calm = Training(rank).run()
    for moment in MOMENTS:
        training = Training(rank, moment)
        before = signal.signal(signal.SIGUSR1, training.save)
        try:
            np.testing.assert_array_equal(training.run(), calm, str(moment))
            assert signal.getsignal(signal.SIGUSR1) == training.save
        finally:
            signal.signal(signal.SIGUSR1, before)
        (saved,) = training.saved
        resumed = Training(rank)
        resumed.load(*saved)
        np.testing.assert_array_equal(resumed.run(), calm, str(moment))


@pytest.mark.distributed
def test_what_a_handler_saves_continues_exactly(ranks: RankPool) -> None:
    ranks(2, interrupt)
