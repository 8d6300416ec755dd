"""Handwritten digits, shifted and noisy: scikit-learn's bundled images, 1797 of 8x8 pixels."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from .task import Batch, Task, classify, draws

PIXELS, CLASSES = 8, 10
EXAMPLES = 64

HELD_OUT = 450
"""Images; the last of the file."""

VIEWS = 4
"""Times that each of them is scored, distorted differently."""

NOISE = 0.2
"""Standard deviation, where ink is 1 and paper 0."""


class Digits(Task):
    """Recognise digits that are shifted by up to a pixel each way and covered with noise, in training and held out.

    Clean ones would soon be learnt, and leave nothing to compare.
    """

    score = "accuracy"

    def batch(self, seed: int, step: int) -> Batch:
        images, labels = (part[:-HELD_OUT] for part in digits())
        generator = draws(seed, step)
        chosen = torch.randperm(len(images), generator=generator)[:EXAMPLES]
        return distort(images[chosen], generator), labels[chosen]

    def held_out(self) -> Batch:
        images, labels = (part[-HELD_OUT:].repeat_interleave(VIEWS, 0) for part in digits())
        return distort(images, torch.Generator().manual_seed(0)), labels

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        images, labels = batch
        return classify(model(images), labels)


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Return all images, float32 [images, 1, PIXELS, PIXELS] from 0 to 1, and what they show, int64 [images]."""
    from sklearn.datasets import load_digits  # takes seconds to import

    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float().view(-1, 1, PIXELS, PIXELS) / 16, torch.from_numpy(labels).long()


def distort(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift every image by up to a pixel each way, and add noise. Shapes as they were."""
    count = len(images)
    padded = nn.functional.pad(images[:, 0], (1, 1, 1, 1))
    rows, columns = torch.randint(3, (2, count, 1), generator=generator) + torch.arange(PIXELS)
    shifted = padded[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return (shifted + NOISE * torch.randn(shifted.shape, generator=generator))[:, None]
