"""Stage 1: LAMB on gradients that are averaged over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..eight_bits import DTYPE as EIGHT_BITS
from ..eight_bits import EightBitAllReduce
from ..kernels.tables import Roll, TensorTable
from .replica import Replica, phase


class Warmup:
    """One warmup step: average (unless DDP did), decide, then moments, trust ratio and update per bucket."""

    name = "warmup"

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._tables: list[TensorTable] = []
        self._sent: list[Tensor] = []
        self._eight_bits: list[EightBitAllReduce] = []

    def step(self, averaged_squares: Tensor | None, roll: Tensor | None) -> None:
        """Take one step.

        Args:
            averaged_squares: fp32 [], sum of squares of this rank's gradients before DDP averaged them; None if it
                was not measured.
            roll: fp32 [ranks * len(Roll)], what ranks answered as DDP averaged the gradients; None if it did not.
        """
        replica = self._replica
        communicator, passes = replica.communicator, replica.passes
        track_rho = replica.clipping and communicator.ranks > 1
        if communicator.ranks == 1 or roll is not None:
            tables = replica.local_gradients()
            replica.roll.view(-1).copy_(replica.answer.view(-1) if roll is None else roll)
            track_rho = track_rho and averaged_squares is not None
            if averaged_squares is not None:
                replica.share_local_squares(averaged_squares.view(1))
        else:
            if track_rho:
                replica.share_local_squares(replica.sum_local_squares())
            with phase("average"):
                tables = self._average()
        with phase("decide"):
            replica.measure(tables)
            passes.decide_averaged(
                replica.norms, replica.local_squares, replica.roll, replica.decision, replica.clip, track_rho
            )
        with phase("update"):
            for bucket, grads in zip(replica.buckets, tables, strict=True):
                passes.lamb_update(
                    bucket.params, bucket.copies, grads, bucket.map, bucket.exp_avg, bucket.exp_avg_sq, bucket.hyper,
                    bucket.rates, replica.clip, replica.decision, bucket.partials[:2], replica.bias_correction,
                )  # fmt: skip

    def abstain(self) -> None:
        """Take part in the averaging of a step that this rank cannot take, so that all ranks skip it.

        Only where the optimizer averages by itself: what DDP has averaged needs nothing more.
        """
        replica = self._replica
        if replica.clipping:
            replica.share_local_squares(torch.zeros_like(replica.clip[:1]))
        replica.answer[replica.communicator.rank, Roll.FAILED] = 1.0
        self._average(abstaining=True)
        replica.answer[replica.communicator.rank, Roll.FAILED] = 0.0
        replica.norms.zero_()
        replica.passes.decide_averaged(
            replica.norms, replica.local_squares, replica.roll, replica.decision, replica.clip, False
        )

    def _average(self, abstaining: bool = False) -> list[TensorTable]:
        """Average the gradients into flat buffers of their own; `p.grad` stays local. The roll call goes along.

        Args:
            abstaining: add zeros instead of this rank's gradients.
        """
        replica, ranks = self._replica, self._replica.communicator.ranks
        if not self._tables:
            self._allocate()
        for bucket in replica.buckets:
            assert bucket.averaged is not None
            if abstaining:
                bucket.averaged.zero_()
            else:
                replica.passes.flatten_gradients(bucket.grads, bucket.map, bucket.averaged, ranks)
        if self._eight_bits:
            self._exchange_eight_bits()
        else:
            self._exchange()
        return self._tables

    def _allocate(self) -> None:
        replica, communicator = self._replica, self._replica.communicator
        eight_bits = replica.gradient_dtype == EIGHT_BITS
        for number, bucket in enumerate(replica.buckets):
            size = bucket.elements
            if eight_bits:
                answer = len(Roll) if number == 0 else 0
                self._eight_bits.append(EightBitAllReduce(communicator, size, answer, replica.device))
            elif number == 0:
                size += replica.answer.numel()
            dtype = torch.float32 if eight_bits else replica.gradient_dtype or bucket.layout.dtype
            flat = torch.zeros(size, dtype=dtype, device=replica.device)
            self._sent.append(flat)
            bucket.averaged = flat[: bucket.elements]
            table = TensorTable(bucket.map.segments, dtype, replica.device)
            table.set(bucket.views(bucket.averaged))
            self._tables.append(table)

    def _exchange(self) -> None:
        """Sum the flat buffers over ranks, in place, as they are."""
        replica, communicator = self._replica, self._replica.communicator
        started = []
        for bucket, flat in zip(replica.buckets, self._sent, strict=True):
            flat[bucket.elements :].copy_(replica.answer.view(-1)[: flat.numel() - bucket.elements])
            started.append(communicator.all_reduce(flat))
        for work in started:
            work.wait()
        for bucket, flat in zip(replica.buckets[:1], self._sent, strict=False):
            replica.roll.view(-1).copy_(flat[bucket.elements :])

    def _exchange_eight_bits(self) -> None:
        """Sum the flat buffers over ranks, in place, rounded to 8 bits."""
        replica = self._replica
        for number, (reduction, flat) in enumerate(zip(self._eight_bits, self._sent, strict=True)):
            reduction.start(flat, replica.answer[replica.communicator.rank, : len(Roll) if number == 0 else 0])
        for reduction in self._eight_bits:
            reduction.add_up()
        answers = [reduction.finish(flat) for reduction, flat in zip(self._eight_bits, self._sent, strict=True)]
        replica.roll.copy_(answers[0])

    def held(self) -> list[Tensor]:
        """Buffers that only this stage has; the buckets hold the others."""
        return [tensor for reduction in self._eight_bits for tensor in reduction.held()]
