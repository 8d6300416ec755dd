"""Stage 1: LAMB on gradients that are averaged over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.tables import TensorTable
from .replica import Replica, phase


class Warmup:
    """One warmup step: average (unless DDP did), decide, then moments, trust ratio and update per bucket."""

    name = "warmup"

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._tables: list[TensorTable] = []

    def step(self, averaged_squares: Tensor | None, averaged: bool) -> None:
        """Take one step.

        Args:
            averaged_squares: fp32 [], sum of squares of this rank's gradients before DDP averaged them; None if it
                was not measured.
            averaged: whether the gradients are already averaged.
        """
        replica = self._replica
        communicator, passes = replica.communicator, replica.passes
        track_rho = replica.clipping and communicator.ranks > 1
        if communicator.ranks == 1 or averaged:
            tables = replica.local_gradients()
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
            passes.decide_averaged(replica.norms, replica.local_squares, replica.decision, replica.clip, track_rho)
        with phase("update"):
            for bucket, grads in zip(replica.buckets, tables, strict=True):
                passes.lamb_update(
                    bucket.params, bucket.copies, grads, bucket.map, bucket.exp_avg, bucket.exp_avg_sq, bucket.hyper,
                    bucket.rates, replica.clip, replica.decision, bucket.partials[:2], replica.bias_correction,
                )  # fmt: skip

    def _average(self) -> list[TensorTable]:
        """Average the gradients into flat buffers of their own; `p.grad` stays local."""
        replica = self._replica
        if not self._tables:
            for bucket in replica.buckets:
                bucket.averaged = torch.zeros(bucket.elements, dtype=bucket.layout.dtype, device=replica.device)
                table = TensorTable(bucket.map.segments, bucket.layout.dtype, replica.device)
                table.set(bucket.views(bucket.averaged))
                self._tables.append(table)
        started = []
        for bucket in replica.buckets:
            replica.passes.flatten_gradients(bucket.grads, bucket.map, bucket.averaged, replica.communicator.ranks)
            assert bucket.averaged is not None
            started.append(replica.communicator.all_reduce(bucket.averaged))
        for work in started:
            work.wait()
        return self._tables

    def held(self) -> list[Tensor]:
        """Buffers that only this stage has (the buckets hold all of them)."""
        return []
