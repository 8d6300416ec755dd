"""Ranks in one process: threads that take turns, each until it needs what the others have.

Only one of them runs at a time, so that a training of n ranks takes one core, and gives what n processes would give.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock, Thread, local
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from onebit_triton import OneBitLamb, optimizer
from onebit_triton.clock import Clock, Work
from onebit_triton.collectives import Communicator, Done, Traffic
from onebit_triton.failures import Watch

T = TypeVar("T")


class _Abandoned(Exception):  # noqa: N818
    """Another rank has raised."""


class LocalRanks:
    """n ranks.

    Args:
        ranks: how many.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._turns = [Lock() for _ in range(ranks)]
        self._thread = local()
        self._brought: list[Any] = [None] * ranks
        self._failed = False

    @property
    def rank(self) -> int:
        """That of the thread that asks."""
        return self._thread.rank

    def run(self, function: Callable[[int], T]) -> list[T]:
        """What function(rank) returns on every rank.

        Raises:
            Exception: what the first rank raised that did.
        """
        results: list[Any] = [None] * self.ranks
        errors: list[BaseException] = []
        self._failed = False
        for turn in self._turns:
            turn.acquire(blocking=False)

        def rank_runs(rank: int) -> None:
            self._thread.rank = rank
            self._turns[rank].acquire()
            try:
                if not self._failed:
                    results[rank] = function(rank)
            except _Abandoned:
                pass
            except BaseException as error:
                errors.append(error)
                self._failed = True
            finally:
                self._turns[(rank + 1) % self.ranks].release()

        threads = [Thread(target=rank_runs, args=(rank,)) for rank in range(self.ranks)]
        for thread in threads:
            thread.start()
        self._turns[0].release()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results

    def exchange(self, rank: int, brought: T, merge: Callable[[list[T]], None]) -> None:
        """Bring something; once all ranks have, `merge` is called with what they brought, in rank order, by one."""
        self._brought[rank] = brought
        if rank == self.ranks - 1:
            merge(self._brought)
        self._turns[(rank + 1) % self.ranks].release()
        self._turns[rank].acquire()
        if self._failed:
            raise _Abandoned


def _all_to_all(brought: list[tuple[Tensor, Tensor]]) -> None:
    for receiver, (received, _) in enumerate(brought):
        for sender, (_, sent) in enumerate(brought):
            received[sender].copy_(sent[receiver])


def _all_gather(brought: list[tuple[Tensor, Tensor]]) -> None:
    every = torch.cat([sent for _, sent in brought])
    for gathered, _ in brought:
        gathered.copy_(every)


def _all_reduce(brought: list[tuple[Tensor]]) -> None:
    (total,) = (tensor.clone() for tensor in brought[0])
    for (tensor,) in brought[1:]:
        total += tensor
    for (tensor,) in brought:
        tensor.copy_(total)


def _broadcast(brought: list[tuple[Tensor]]) -> None:
    for (tensor,) in brought[1:]:
        tensor.copy_(brought[0][0])


MERGES: dict[str, Callable[[list[Any]], None]] = {
    "all_to_all_single": _all_to_all, "all_gather_single": _all_gather, "all_gather_into_tensor": _all_gather,
    "all_reduce": _all_reduce, "broadcast": _broadcast,
}  # fmt: skip
"""Collective of torch.distributed -> what it does to the tensors that it is given on every rank, in rank order."""


class LocalCommunicator(Communicator):
    """The rank that makes it: a `Communicator` whose collectives are over when they have been started."""

    def __init__(self, group: LocalRanks) -> None:
        self.group, self.rank, self.ranks = None, group.rank, group.ranks
        self.traffic, self.clock = Traffic(), Clock()
        self.watch = Watch(range(group.ranks), self.rank, None, None)
        self._local = group

    def _start(self, collective: Callable[..., Any], *tensors: Tensor, **options: int) -> Work:
        self._local.exchange(self.rank, tensors, MERGES[collective.__name__])
        return Done()

    def broadcast(self, tensor: Tensor) -> None:
        """Give every rank the tensor of rank 0."""
        self._start(dist.broadcast, tensor)


class Replicas:
    """n optimizers of n replicas of the same parameters.

    Args:
        params: what rank 0 trains; the other ranks train copies.
        ranks: how many.
        build: makes an optimizer over such parameters.

    Attributes:
        optimizers: one per rank.
    """

    def __init__(self, params: list[torch.nn.Parameter], ranks: int, build: Callable[[list[Any]], OneBitLamb]) -> None:
        self._group = LocalRanks(ranks)
        copies = [[torch.nn.Parameter(p.detach().clone()) for p in params] for _ in range(ranks - 1)]
        self._params = [params, *copies]

        # Around all ranks at once: they are in the midst of it together.
        with patch.object(optimizer, "Communicator", lambda _: LocalCommunicator(self._group)):
            self.optimizers = self._group.run(lambda rank: build(self._params[rank]))

    def step(self, gradients: list[list[Tensor | None]]) -> None:
        """Take one step with the gradients of every rank."""
        for params, grads in zip(self._params, gradients, strict=True):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
        self._group.run(lambda rank: self.optimizers[rank].step())
