"""One training: a task, a method, a seed; what came of it as a dict that is JSON."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from .methods import METHODS, Method
from .tasks import TASKS

RANKS = 4

BETAS, WEIGHT_DECAY = (0.9, 0.99), 0.01

DIVERGED = 3.0
"""A loss so many times as high as that of the first step is the end of a training."""


@dataclass(frozen=True)
class Run:
    """What decides a training to the last bit, on one machine.

    Attributes:
        task, method: by their names in `TASKS` and `METHODS`.
        steps: how many.
        ramp: steps in which the learning rate rises; then it falls as a cosine to a tenth.
        lr: the highest learning rate.
        seed: of weights and batches.
        ranks: how many share the batch.
        options: of the optimizer, beside those that all trainings have; dtypes by their names in torch.
        backend: of the optimizer.
        looks: how often it looks at the held-out data, besides before its first step.
    """

    task: str
    method: str
    steps: int
    ramp: int
    lr: float
    seed: int
    ranks: int
    options: dict[str, Any]
    backend: str
    looks: int

    @property
    def name(self) -> str:
        """Of its file."""
        shown = "".join(f"-{key}={value}" for key, value in sorted(self.options.items()))
        return f"{self.task}/{self.method}{shown}-{self.steps}x{self.ranks}-lr{self.lr:g}-seed{self.seed}"

    def learning_rate(self, step: int) -> float:
        """Of a step, from 0."""
        if step < self.ramp:
            return self.lr * (step + 1) / self.ramp
        done = (step - self.ramp) / max(1, self.steps - self.ramp)
        return self.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def train(run: Run) -> dict[str, Any]:
    """Train.

    Returns:
        The run; `losses`, the mean over ranks and ten steps each; `held_out`, a list of step, bytes sent by rank 0 and
        what the task measures; `switched`, the first compressed step, if any; `diverged`; `seconds`.
    """
    torch.set_num_threads(1)
    started = time.monotonic()
    task = TASKS[run.task]
    torch.manual_seed(run.seed)
    model = task.model()
    params = list(model.parameters())
    options = dict(run.options)
    if "gradient_dtype" in options:
        options["gradient_dtype"] = getattr(torch, options["gradient_dtype"])
    method = METHODS[run.method](
        params, run.ranks, lr=run.lr, betas=BETAS, weight_decay=WEIGHT_DECAY, backend=run.backend, block_elements=256,
        **options,
    )  # fmt: skip
    losses: list[float] = []
    held_out = [_look(run, model, 0, method)]
    switched = None
    looks = {round(run.steps * look / run.looks) for look in range(1, run.looks + 1)}
    for step in range(run.steps):
        if switched is None and method.optimizer.stage == "compression":
            switched = step
        gradients, total = [], 0.0
        for rank in range(run.ranks):
            loss = task.loss(model, run.seed, step, rank, run.ranks)
            gradients.append(torch.autograd.grad(loss, params))
            total += loss.item()
        losses.append(total / run.ranks)
        if not losses[-1] < DIVERGED * losses[0]:
            break
        method.step(gradients, run.learning_rate(step))
        if step + 1 in looks:
            held_out.append(_look(run, model, step + 1, method))
    return {
        "run": asdict(run), "losses": [round(mean(losses[i : i + 10]), 5) for i in range(0, len(losses), 10)],
        "held_out": held_out, "switched": switched,
        "diverged": len(losses) < run.steps or not losses[-1] < DIVERGED * losses[0],
        "parameters": sum(p.numel() for p in params), "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip


def _look(run: Run, model: torch.nn.Module, step: int, method: Method) -> dict[str, Any]:
    return {"step": step, "bytes": method.bytes_sent, **TASKS[run.task].evaluate(model)}


def trained(run: Run, folder: Path) -> dict[str, Any]:
    """The result of a training; read from its file, or trained now and written there."""
    path = folder / f"{run.name}.json"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(train(run)) + "\n")
        unfinished.rename(path)
    return json.loads(path.read_text())
