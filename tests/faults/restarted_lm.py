"""examples/train_lm.py, in which rank 1 kills itself once, before the step that the first argument names."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import train_lm

at, struck = int(sys.argv.pop(1)), Path(sys.argv.pop(1))
train_step = train_lm.Trainer.train_step


def killed_step(self: train_lm.Trainer, text: torch.Tensor, step: int) -> Any:
    """Die in the given step, the first time."""
    if step == at and self.worker.rank == 1 and not struck.exists():
        assert self.optimizer.stage == "compression"
        struck.write_text(str(os.getppid()))
        if "--whole-node" in os.environ.get("FAULT", ""):
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    return train_step(self, text, step)


train_lm.Trainer.train_step = killed_step  # type: ignore[method-assign]
train_lm.main()
