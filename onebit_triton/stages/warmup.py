"""Stage 1: LAMB on gradients that are averaged over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.tables import Roll, TensorTable
from .replica import Replica, phase


class Warmup:
    """One warmup step: average (unless DDP did), decide, then moments, trust ratio and update per bucket."""

    name = "warmup"

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._tables: list[TensorTable] = []
        self._sent: list[Tensor] = []

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
        replica, communicator = self._replica, self._replica.communicator
        if not self._tables:
            for number, bucket in enumerate(replica.buckets):
                size = bucket.elements + (replica.answer.numel() if number == 0 else 0)
                dtype = replica.gradient_dtype or bucket.layout.dtype
                flat = torch.zeros(size, dtype=dtype, device=replica.device)
                self._sent.append(flat)
                bucket.averaged = flat[: bucket.elements]
                table = TensorTable(bucket.map.segments, dtype, replica.device)
                table.set(bucket.views(bucket.averaged))
                self._tables.append(table)
        started = []
        for bucket, flat in zip(replica.buckets, self._sent, strict=True):
            assert bucket.averaged is not None
            if abstaining:
                bucket.averaged.zero_()
            else:
                replica.passes.flatten_gradients(bucket.grads, bucket.map, bucket.averaged, communicator.ranks)
            flat[bucket.elements :].copy_(replica.answer.view(-1)[: flat.numel() - bucket.elements])
            started.append(communicator.all_reduce(flat))
        for work in started:
            work.wait()
        for bucket, flat in zip(replica.buckets[:1], self._sent, strict=False):
            replica.roll.view(-1).copy_(flat[bucket.elements :])
        return self._tables

    def held(self) -> list[Tensor]:
        """Buffers that only this stage has (the buckets hold all of them)."""
        return []
