"""Checkpoints that a crash does not destroy, and that continue at any number of processes.

FOLDER/step-N is complete once it has the file `.metadata`, which torch writes last, under another name first. A crash
before that leaves the checkpoint before it as the newest.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from onebit_triton import OneBitLamb

KEPT = 2
"""How many complete checkpoints stay."""


def newest(folder: Path) -> Path | None:
    """Return the newest complete checkpoint, if there is one."""
    complete = [file.parent for file in folder.glob("step-*/.metadata")]
    return max(complete, key=_step, default=None)


def save(folder: Path, step: int, model: torch.nn.Module, optimizer: OneBitLamb, **others: Any) -> None:
    """Save on all ranks together, then remove what is older than the last two."""
    # Otherwise every rank would have pending errors of its own, which fit only as many ranks.
    optimizer.consolidate_errors()
    alone = not dist.is_initialized()
    state = _state(model, optimizer, others) | {"step": step}
    dcp.save(state, checkpoint_id=folder / f"step-{step}", no_dist=alone)
    if alone or dist.get_rank() == 0:
        complete = sorted((file.parent for file in folder.glob("step-*/.metadata")), key=_step)
        for old in folder.glob("step-*"):
            if old not in complete[-KEPT:]:
                (old / ".metadata").unlink(missing_ok=True)  # first, so that half of it is never taken for a whole
                shutil.rmtree(old)


def load(checkpoint: Path, model: torch.nn.Module, optimizer: OneBitLamb, **others: Any) -> int:
    """Continue from a checkpoint, on all ranks together; the number of its step."""
    # torch reads into a state that has the keys already: those of compression too, though the optimizer is still new.
    optimizer.consolidate_errors()
    state = _state(model, optimizer, others) | {"step": 0}
    dcp.load(state, checkpoint_id=checkpoint, no_dist=not dist.is_initialized())
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for name, other in others.items():
        other.load_state_dict(state[name])
    return state["step"]


def _state(model: torch.nn.Module, optimizer: OneBitLamb, others: dict[str, Any]) -> dict[str, Any]:
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    return state | {name: other.state_dict() for name, other in others.items()}


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))
