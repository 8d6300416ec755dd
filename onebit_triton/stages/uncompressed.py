"""Stage 2 on one rank: nothing is compressed, the momentum stays exact, the rest is as on several ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.tables import HEADER_BYTES
from .replica import Replica, phase


class Uncompressed:
    """One step of stage 2 without an exchange."""

    name = "compression"

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._no_messages = torch.zeros(1, HEADER_BYTES, dtype=torch.uint8, device=replica.device)

    def step(self) -> None:
        """Take one step."""
        replica, passes = self._replica, self._replica.passes
        decision, clip = replica.decision, replica.clip
        with phase("decide"):
            replica.measure(replica.local_gradients())
            passes.decide_averaged(replica.norms, replica.local_squares, replica.roll, decision, clip, False)
        with phase("update"):
            for bucket in replica.buckets:
                passes.compressed_update(
                    bucket.params, bucket.copies, bucket.grads, bucket.map, self._no_messages, self._no_messages,
                    bucket.exp_avg, bucket.exp_avg_sq, bucket.exp_avg_sq_fresh, bucket.hyper, bucket.rates, clip,
                    decision, bucket.partials, replica.bias_correction,
                )  # fmt: skip

    def held(self) -> list[Tensor]:
        """Buffers that only this stage has."""
        return []
