"""Windows of the standard library's texts, for the tasks over bytes."""

from __future__ import annotations

from functools import cache

from corpus import Corpus, held_out_batches, load_corpus, training_batch
from torch import Tensor

BYTES = 256
"""Different bytes that there are."""

HELD_OUT = 512
"""Windows that are scored."""


@cache
def corpus() -> Corpus:
    """Read the texts, once."""
    return load_corpus()


def windows(sequences: int, context: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Draw the windows of a step: bytes and the byte after each, int64 [sequences, context]."""
    return training_batch(corpus().train, sequences=sequences, context=context, seed=seed, step=step)


def held_out_windows(context: int) -> tuple[Tensor, Tensor]:
    """Return evenly spaced held-out windows: bytes and the byte after each, int64 [HELD_OUT, context]."""
    return next(held_out_batches(corpus().held_out, sequences=HELD_OUT, context=context, batch=HELD_OUT))
