"""The hook that DistributedDataParallel calls with each bucket of gradients: averages in warmup, leaves them after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .collectives import Communicator
from .eight_bits import DTYPE as EIGHT_BITS
from .eight_bits import EightBitAllReduce
from .failures import Pending, doing


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
        dtype: what gradients are averaged in; None: theirs.
        answer: returns this rank's answer to the roll call, fp32, which goes along with the gradients.
    """

    def __init__(
        self, communicator: Communicator, measuring: bool, dtype: torch.dtype | None, answer: Callable[[], Tensor]
    ) -> None:
        self.communicator = communicator
        self._dtype, self._answer = dtype, answer
        self.roll: Tensor | None = None
        self.averaging = True
        self.measuring = measuring
        self.averaged = False
        self.squares: Tensor | None = None
        self._started: list[Pending] = []
        self._eight_bits: list[tuple[EightBitAllReduce, Tensor, torch.futures.Future[Tensor], bool]] = []

    def reset(self) -> None:
        """Forget the last backward pass."""
        self.averaged = False
        self.squares = None
        self._started.clear()
        self._eight_bits.clear()

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
        if bucket.is_last():
            # Runs before DDP waits for the futures, which would name nobody.
            torch.autograd.Variable._execution_engine.queue_callback(self._wait)
        # The roll call goes along with the first bucket, which DDP keeps small: no collective more.
        calling = bucket.index() == 0
        if calling and self.roll is None:
            self.roll = torch.empty_like(self._answer())
        start = self._start_eight_bits if self._dtype == EIGHT_BITS else self._start
        return start(buffer, calling)

    def _start(self, buffer: Tensor, calling: bool) -> torch.futures.Future[Tensor]:
        """Sum a bucket over ranks, in the dtype that is sent."""
        sent = buffer.to(self._dtype or buffer.dtype)
        if calling:
            sent = torch.cat((sent, self._answer().to(sent.dtype)))
        self.communicator.count_all_reduce(sent)
        work = dist.all_reduce(sent, group=self.communicator.group, async_op=True)
        if buffer.device.type == "cpu":
            self._started.append(work)
        roll = self.roll if calling else None

        def received(done: Any) -> Tensor:
            averaged = done.value()[0]
            if roll is not None:
                roll.copy_(averaged[buffer.numel() :])
            return averaged if sent is buffer else buffer.copy_(averaged[: buffer.numel()])

        return work.get_future().then(received)

    def _start_eight_bits(self, buffer: Tensor, calling: bool) -> torch.futures.Future[Tensor]:
        """Begin to sum a bucket over ranks: its second exchange starts when all first ones have been started."""
        answer = self._answer().view(self.communicator.ranks, -1)[self.communicator.rank]
        answer = answer if calling else answer[:0]
        reduction = EightBitAllReduce(self.communicator, buffer.numel(), answer.numel(), buffer.device)
        reduction.start(buffer, answer)
        future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=None if buffer.device.type == "cpu" else [buffer.device]
        )
        self._eight_bits.append((reduction, buffer, future, calling))
        return future

    def _wait(self) -> None:
        """Wait for the averages where that blocks, as backward is about to do."""
        started, self._started = self._started, []
        reductions, self._eight_bits = self._eight_bits, []
        with doing("step"), doing("backward"):
            for work in started:
                self.communicator.watch.wait(work, on_cpu=True)
            for reduction, *_ in reductions:
                reduction.add_up()
            for reduction, buffer, future, calling in reductions:
                answers = reduction.finish(buffer)
                if calling and self.roll is not None:
                    self.roll.copy_(answers.reshape(-1))
                future.set_result(buffer)


def install_hook(
    model: torch.nn.Module, communicator: Communicator, measuring: bool, dtype: torch.dtype | None,
    answer: Callable[[], Tensor],
) -> GradientHook:  # fmt: skip
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
    hook = GradientHook(communicator, measuring, dtype, answer)

    # DDP inspects the signature: the second argument must be called bucket, and annotations must not be strings.
    def reduce_gradients(state, bucket):  # type: ignore[no-untyped-def]
        return hook(bucket)

    model.register_comm_hook(None, reduce_gradients)
    return hook
