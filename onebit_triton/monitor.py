"""What the host learns of decisions that are made on the device: late, without waiting, and only to report."""

from __future__ import annotations

import logging

import torch

from .kernels.tables import Decision, Fault
from .stages import Replica

logger = logging.getLogger("onebit_triton")

ALIKE_STEPS = 20
"""Steps in a row with gradients that are equal on all ranks, or of one norm, before the warning. Norms of large batches
come close by chance, and those that were clipped are equal to the last bit now and then."""


LAG = 2
"""Steps after which decisions are looked at on CUDA: the device has long made them, and every rank learns of the same
decision after the same step, so that all raise together. On a CPU they are looked at at once."""


class Monitor:
    """Copies the decision vector to the host behind each step, and reports it when the copy must have arrived.

    Args:
        replica: whose decisions.
    """

    def __init__(self, replica: Replica) -> None:
        self._decision = replica.decision
        self._rank = replica.communicator.rank
        self._on_cuda = replica.device.type == "cuda"
        slots = LAG + 1 if self._on_cuda else 1
        self._copies = [torch.zeros(len(Decision), dtype=torch.int32, pin_memory=self._on_cuda) for _ in range(slots)]
        self._events = [torch.cuda.Event() for _ in range(slots)] if self._on_cuda else []
        self._observed = 0
        self._skipped = int(self._decision[Decision.SKIPPED])
        self._warned_equal = self._warned_clipped = False

    def observe(self) -> list[int] | None:
        """Start copying the decision of the last step.

        Returns:
            That of `LAG` steps before on CUDA, of this step on a CPU; None if there has been none yet.
        """
        slot = self._observed % len(self._copies)
        self._copies[slot].copy_(self._decision, non_blocking=True)
        if self._on_cuda:
            self._events[slot].record()
        self._observed += 1
        if self._observed < len(self._copies):
            return None
        oldest = self._observed % len(self._copies)
        if self._on_cuda:
            self._events[oldest].synchronize()
        return self._copies[oldest].tolist()

    def log(self, seen: list[int]) -> None:
        """Log what a decision tells."""
        if seen[Decision.SKIPPED] > self._skipped:
            self._skipped = seen[Decision.SKIPPED]
            who = f"rank {seen[Decision.BAD_RANK]}" if seen[Decision.BAD_RANK] >= 0 else "a rank"
            if self._rank == 0 and not seen[Decision.FAULT] & ~Fault.NONFINITE:
                logger.warning(
                    "non-finite gradients on %s: all ranks skipped the step (%d skipped so far, %d in a row)",
                    who, self._skipped, seen[Decision.STREAK],
                )  # fmt: skip
        if seen[Decision.EQUAL] >= ALIKE_STEPS and not self._warned_equal:
            self._warned_equal = True
            if self._rank == 0:
                logger.warning(
                    "gradients are equal on all ranks for %d steps: something else (DistributedDataParallel without a "
                    "hook?) still averages them at full precision, so compression saves nothing. Wrap the model as "
                    "`model = optimizer.attach(DistributedDataParallel(model))`.",
                    seen[Decision.EQUAL],
                )
        if seen[Decision.ONE_NORM] >= ALIKE_STEPS > seen[Decision.EQUAL] and not self._warned_clipped:
            self._warned_clipped = True
            if self._rank == 0:
                logger.warning(
                    "gradients have the same norm on all ranks for %d steps, though they differ: something clips the "
                    "gradient of every rank by its own norm (torch.nn.utils.clip_grad_norm_, or a trainer's option?), "
                    "which in compression weighs ranks unequally and shrinks the signal. Leave it out and give the "
                    "optimizer max_grad_norm, which clips all ranks by one factor.",
                    seen[Decision.ONE_NORM],
                )


def fault_message(seen: list[int]) -> str | None:
    """What is wrong with a step, if it is an error on every rank; not what ranks do not agree on."""
    rank = seen[Decision.BAD_RANK]
    told = {
        Fault.LAYOUT: f"a message from rank {rank} does not belong to rank 0's layout. Every rank must run the same "
        "version over the same parameters.",
        Fault.FAILED: f"rank {rank} could not take this step; its own error message says why. Mend that and go on, on "
        "all ranks.",
        Fault.DAMAGED: f"rank {rank} received a corrupted message in the last step, so its parameters are no longer "
        "those of the other ranks. Load the last checkpoint, or call check_replicas(repair=True) on all ranks to go on "
        "with what rank 0 has.",
        Fault.CORRUPT: f"a message from rank {rank} was corrupted on its way. Parameters and moments are as they were; "
        "pending errors are not: load the last checkpoint.",
    }
    found = [text for fault, text in told.items() if seen[Decision.FAULT] & fault]
    return f"No rank has applied this step: {found[0]}" if found else None
