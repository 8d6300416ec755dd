"""The hook that DistributedDataParallel calls with each bucket of gradients: averages in warmup, leaves them after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .collectives import Communicator


class GradientHook:
    """Communication hook of one DDP model. Nothing is keyed by DDP's buckets: DDP rebuilds them.

    Attributes:
        averaging: whether the next backward pass averages; set by the optimizer when its stage changes.
        measuring: whether to add up the sums of squares of the local gradients (clipping needs them).
        averaged: whether the last backward pass averaged; cleared by the optimizer after each step.
        squares: fp32 [], sum of squares of the local gradients since the last step, or None.
        roll: fp32 [elements of an answer], the sum of all ranks' answers to the roll call, of the last backward pass
            that averaged.

    Args:
        communicator: of the optimizer.
        measuring: see above.
        answer: returns this rank's answer to the roll call, fp32, which goes along with the gradients.
    """

    def __init__(self, communicator: Communicator, measuring: bool, answer: Callable[[], Tensor]) -> None:
        self.communicator = communicator
        self._answer = answer
        self.roll: Tensor | None = None
        self.averaging = True
        self.measuring = measuring
        self.averaged = False
        self.squares: Tensor | None = None

    def reset(self) -> None:
        """Forget the last backward pass."""
        self.averaged = False
        self.squares = None

    def __call__(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """What DDP calls; returns the bucket's gradients, averaged or as they are."""
        buffer = bucket.buffer()
        if not self.averaging:
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(buffer)
            return future
        self.averaged = True
        if self.measuring:
            squares = buffer.float().square().sum()
            self.squares = squares if self.squares is None else self.squares + squares
        buffer.div_(self.communicator.ranks)
        if bucket.index() == 0:
            return self._average_with_roll(buffer)
        self.communicator.count_all_reduce(buffer)
        work = dist.all_reduce(buffer, group=self.communicator.group, async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    def _average_with_roll(self, buffer: Tensor) -> torch.futures.Future[Tensor]:
        """Send the roll call along with the first bucket, which DDP keeps small: no collective more."""
        answer = self._answer()
        together = torch.cat((buffer, answer.to(buffer.dtype)))
        if self.roll is None:
            self.roll = torch.empty_like(answer)
        roll = self.roll
        self.communicator.count_all_reduce(together)
        work = dist.all_reduce(together, group=self.communicator.group, async_op=True)

        def apart(done: Any) -> Tensor:
            summed = done.value()[0]
            roll.copy_(summed[buffer.numel() :])
            return buffer.copy_(summed[: buffer.numel()])

        return work.get_future().then(apart)


def install_hook(
    model: torch.nn.Module, communicator: Communicator, measuring: bool, answer: Callable[[], Tensor]
) -> GradientHook:
    """Register a `GradientHook` on a DDP model.

    Raises:
        TypeError: if the model is not a DistributedDataParallel.
        ValueError: if its process group has other members than the optimizer's.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"Invalid model {type(model).__name__}. Must be a torch.nn.parallel.DistributedDataParallel; without DDP, "
            "leave attach out: the optimizer averages gradients itself."
        )
    theirs = dist.get_process_group_ranks(model.process_group)
    ours = dist.get_process_group_ranks(communicator.group)
    if theirs != ours:
        raise ValueError(f"Invalid model: its process group has ranks {theirs}, the optimizer's has {ours}.")
    hook = GradientHook(communicator, measuring, answer)

    # DDP inspects the signature: the second argument must be called bucket, and annotations must not be strings.
    def reduce_gradients(state, bucket):  # type: ignore[no-untyped-def]
        return hook(bucket)

    model.register_comm_hook(None, reduce_gradients)
    return hook
