"""What the host learns of decisions that are made on the device: late, without waiting, and only to report."""

from __future__ import annotations

import logging

import torch

from .kernels.tables import Decision
from .stages import Replica

logger = logging.getLogger("onebit_triton")

ALIKE_STEPS = 20
"""Steps in a row with gradients that are equal on all ranks, or of one norm, before the warning. Norms of large batches
come close by chance, and those that were clipped are equal to the last bit now and then."""


class Monitor:
    """Copies the decision vector to the host behind the step and reports it at a later one.

    Args:
        replica: whose decisions.
    """

    def __init__(self, replica: Replica) -> None:
        self._decision = replica.decision
        self._rank = replica.communicator.rank
        on_cuda = replica.device.type == "cuda"
        self._copy = torch.zeros(len(Decision), dtype=torch.int32, pin_memory=on_cuda)
        self._event = torch.cuda.Event() if on_cuda else None
        self._pending = False
        self._skipped = int(self._decision[Decision.SKIPPED])
        self._warned_equal = self._warned_clipped = False
        self._watching = False

    def observe(self) -> None:
        """Start copying the decisions, unless a copy is still under way."""
        if not self._pending:
            self._copy.copy_(self._decision, non_blocking=True)
            if self._event is not None:
                self._event.record()
            self._pending = True

    def report(self) -> None:
        """Log what has arrived.

        Raises:
            RuntimeError: if a message of another layout arrived.
        """
        if not self._pending or (self._event is not None and not self._event.query()):
            return
        self._pending = False
        seen = self._copy.tolist()
        if seen[Decision.BAD_TAG]:
            raise RuntimeError(
                f"Rank {self._rank}: a message from rank {seen[Decision.BAD_RANK]} does not belong to this layout. "
                "Every rank must run the same version over the same parameters; the step was not applied."
            )
        self._watching = seen[Decision.STREAK] > 0
        if seen[Decision.SKIPPED] > self._skipped:
            self._skipped = seen[Decision.SKIPPED]
            who = f"rank {seen[Decision.BAD_RANK]}" if seen[Decision.BAD_RANK] >= 0 else "a rank"
            if self._rank == 0:
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

    def streak(self) -> tuple[int, int]:
        """Skipped steps in a row, the last one included, and the rank that made it skip, -1 if unknown.

        Waits for the device only after a step that is known to have been skipped; all ranks then see the same number
        after the same step. Elsewhere 0 on a GPU.
        """
        if self._event is None:
            seen = self._copy.tolist()
        elif self._watching:
            seen = self._decision.tolist()
        else:
            return 0, -1
        return seen[Decision.STREAK], seen[Decision.BAD_RANK]
