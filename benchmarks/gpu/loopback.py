"""An optimizer that is one rank of n, alone: what a rank computes in a step, without the others and the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from onebit_triton import OneBitLamb, optimizer
from onebit_triton.collectives import Communicator, Work
from onebit_triton.kernels.backends import PASSES, Passes, load_passes
from onebit_triton.kernels.tables import Header


class _Then:
    """A collective that has been started, or is done, and what is to be done about the messages that have arrived."""

    def __init__(self, work: Work | None, messages: Tensor) -> None:
        self._work, self._messages = work, messages

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        if self._messages.dtype == torch.uint8:
            _pass_for_others(self._messages)


def _pass_for_others(messages: Tensor) -> None:
    """Give message r the sender r; its words still add up to 0."""
    words = messages.view(torch.int32)
    missing = torch.arange(len(words), dtype=torch.int32, device=words.device) - words[:, Header.SENDER]
    words[:, Header.SENDER] += missing
    words[:, Header.CHECK] -= missing


class Loopback(Communicator):
    """Rank 0 of n, without the others.

    Message r arrives under rank r's name as this rank sent it to rank r, so that messages differ; what others would
    gather stays as it was, which is this rank's own message to them; a sum is n times the summand.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__(None)
        self.ranks = ranks

    def all_to_all(self, received: Tensor, sent: Tensor) -> Work:
        """Copy all messages."""
        received.copy_(sent)
        return _Then(None, received)

    def all_gather(self, gathered: Tensor, sent: Tensor) -> Work:
        """Copy this rank's message to its place."""
        gathered.view(self.ranks, -1)[0].copy_(sent.view(-1))
        return _Then(None, gathered)

    def all_reduce(self, tensor: Tensor) -> Work:
        """Multiply by the number of ranks."""
        tensor.mul_(self.ranks)
        return _Then(None, tensor)

    def raise_together(self, error: Exception | None, doing: str) -> None:
        """Raise this rank's error."""
        if error is not None:
            raise error

    def agree(self, facts: Mapping[str, int]) -> None:
        """Nobody disagrees."""


class GroupOfOne(Loopback):
    """The same through a process group of one rank: streams, events and buffers of real asynchronous collectives."""

    def all_to_all(self, received: Tensor, sent: Tensor) -> Work:
        """Send all messages to this rank."""
        return _Then(Communicator.all_to_all(self, received, sent), received)

    def all_gather(self, gathered: Tensor, sent: Tensor) -> Work:
        """Gather this rank's message."""
        return _Then(Communicator.all_gather(self, gathered.view(self.ranks, -1)[0], sent), gathered)

    def all_reduce(self, tensor: Tensor) -> Work:
        """Sum what one rank has, times the number of ranks."""
        tensor.mul_(self.ranks)
        return Communicator.all_reduce(self, tensor)


def wrapped_passes(device: torch.device, wrap: Callable[[str, Callable[..., None]], Callable[..., None]]) -> Passes:
    """The Triton passes, each replaced by what `wrap` makes of its name and itself."""
    passes = load_passes("triton", device)
    for names in PASSES.values():
        for name in names:
            setattr(passes, name, wrap(name, getattr(passes, name)))
    return passes


def one_rank_of(
    ranks: int,
    params: Any,
    passes: Passes | None = None,
    communicator: type[Loopback] = Loopback,
    **options: Any,
) -> OneBitLamb:
    """An optimizer that takes itself for rank 0 of so many.

    Args:
        ranks: how many; 1 is an ordinary single process.
        params: as for `OneBitLamb`.
        passes: what to run instead of the backend's passes.
        communicator: what stands for the other ranks.
        options: as for `OneBitLamb`.
    """
    with ExitStack() as stack:
        if ranks > 1:
            stack.enter_context(patch.object(optimizer, "Communicator", lambda group: communicator(ranks)))
        if passes is not None:
            stack.enter_context(patch.object(optimizer, "load_passes", lambda backend, device: passes))
        built = OneBitLamb(params, **options)
        # Nobody else answers the roll call: so does this rank, and all rows are alike.
        built._hyper.answer = lambda *_: built._replica.answer.view(-1)  # type: ignore[method-assign]
        return built
