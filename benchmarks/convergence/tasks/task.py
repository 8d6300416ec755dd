"""What a task is."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = tuple[Tensor, ...]
"""What a model takes and what it should say; the first dimension of every tensor counts the examples."""

CHUNK = 512
"""Examples at a time in `Task.evaluate`."""


class Task(ABC):
    """A model, its training data and its held-out data.

    The batch of a step is a function of (seed, step) alone, with all that is random about it: runs resume without any
    state of the data, and see the same examples on any number of ranks. No model drops anything out.
    """

    name: str
    """In lower case, with hyphens."""

    score: str
    """The number of `evaluate` that counts: "loss" (in nats, lower is better) or "accuracy" (higher is better)."""

    @abstractmethod
    def model(self) -> nn.Module:
        """Make the model, in training mode, with weights drawn from torch's global generator."""

    @abstractmethod
    def batch(self, seed: int, step: int) -> Batch:
        """Draw the batch of one step, of all ranks together.

        Args:
            seed: selects the stream of batches; not negative.
            step: from 0.
        """

    @abstractmethod
    def held_out(self) -> Batch:
        """Return the examples that are never trained on, always the same."""

    @abstractmethod
    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return means over a batch, scalars: "loss", which has a gradient, and "accuracy" where it makes sense."""

    def loss(self, model: nn.Module, seed: int, step: int, rank: int, ranks: int) -> Tensor:
        """Return the mean loss of one rank's share of the batch, a scalar.

        The mean over all ranks is that of the batch, except where a model looks at its whole share at once.

        Args:
            model: from `model`, in training mode.
            seed: selects the stream of batches; not negative.
            step: from 0.
            rank: whose share.
            ranks: how many share the batch.

        Raises:
            ValueError: the batch cannot be divided so.
        """
        return self.measure(model, share(self.batch(seed, step), rank, ranks))["loss"]

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the held-out means of `measure`. The same for the same weights; the model's mode is left as it was."""
        batch = self.held_out()
        training = model.training
        model.eval()
        sums: dict[str, float] = {}
        for chunk in zip(*(tensor.split(CHUNK) for tensor in batch), strict=True):
            for name, mean in self.measure(model, chunk).items():
                sums[name] = sums.get(name, 0.0) + mean.item() * len(chunk[0])
        model.train(training)
        return {name: total / len(batch[0]) for name, total in sums.items()}


def share(batch: Batch, rank: int, ranks: int) -> Batch:
    """Cut one rank's share out of a batch: as many examples as any other's, and none of them.

    Raises:
        ValueError: the batch cannot be divided so.
    """
    examples = len(batch[0])
    if ranks < 1 or examples % ranks:
        raise ValueError(f"Invalid ranks={ranks}. Must divide the batch of {examples} examples.")
    if not 0 <= rank < ranks:
        raise ValueError(f"Invalid rank={rank}. Must be from 0 to {ranks - 1}.")
    each = examples // ranks
    return tuple(tensor[rank * each : (rank + 1) * each] for tensor in batch)


def draws(seed: int, step: int) -> torch.Generator:
    """Make the generator of what is random in the batch of a step."""
    # Seeds of steps that follow each other give related streams unless they are hashed.
    state = np.random.SeedSequence((seed, step)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))


def classify(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Return the mean cross-entropy in nats and the share of right answers.

    Args:
        logits: float [..., classes].
        targets: int64 [...].
    """
    loss = functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
    return {"loss": loss, "accuracy": (logits.argmax(-1) == targets).double().mean()}
