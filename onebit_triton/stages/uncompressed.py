"""Stage 2 on one rank: nothing is compressed, the momentum stays exact, the rest is as on several ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.tables import HEADER_BYTES
from .replica import Replica


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
        replica.measure(replica.local_gradients())
        passes.decide_averaged(replica.norms, replica.local_squares, decision, clip, False)
        for bucket in replica.buckets:
            passes.fresh_variance(
                bucket.params, bucket.grads, bucket.map, self._no_messages, self._no_messages, bucket.exp_avg,
                bucket.exp_avg_sq, bucket.exp_avg_sq_fresh, bucket.hyper, bucket.rates, clip, decision, bucket.partials,
            )  # fmt: skip
            passes.soft_threshold_rate(bucket.map, bucket.partials, bucket.hyper, bucket.rates, decision)
            passes.compressed_apply(
                bucket.params, bucket.map, self._no_messages, bucket.exp_avg, bucket.exp_avg_sq, bucket.hyper,
                bucket.rates, decision,
            )  # fmt: skip

    def held(self) -> list[Tensor]:
        """Buffers that only this stage has."""
        return []
