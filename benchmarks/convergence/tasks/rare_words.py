"""A word model with a large input embedding, of which a batch touches few rows: most words are rare.

The gradient of the embedding is dense, and zero in all other rows. A word that occurs for the first time after
compression has begun has moments of zero.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .task import Batch, Task, classify, draws
from .texts import corpus

VOCABULARY = 8192
"""The most frequent words have tokens 0, 1, ... in this order; all others share the token after them."""

FREQUENT = 1024
"""Words that are to be predicted: the rest would make an output layer that costs more than all else."""

BEFORE, EMBEDDED, HIDDEN = 8, 32, 64
EXAMPLES = 512
HELD_OUT = 2000


class WordMLP(nn.Module):
    """Predicts a word from the `BEFORE` words before it, after Bengio et al. (2003)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY + 1, EMBEDDED)
        self.hidden = nn.Linear(BEFORE * EMBEDDED, HIDDEN)
        self.head = nn.Linear(HIDDEN, FREQUENT)

    def forward(self, words: Tensor) -> Tensor:
        """Map int64 [examples, BEFORE] to logits, float [examples, FREQUENT]."""
        return self.head(self.hidden(self.embedding(words).flatten(1)).tanh())


class RareWords(Task):
    """Predict words of the standard library's texts, those that are frequent. The loss is in nats per word."""

    name = "rare-words"
    score = "loss"

    def model(self) -> nn.Module:
        return WordMLP()

    def batch(self, seed: int, step: int) -> Batch:
        train, _ = texts()
        chosen = torch.randint(len(train.places), (EXAMPLES,), generator=draws(seed, step))
        return examples(train.words, train.places[chosen])

    def held_out(self) -> Batch:
        _, held_out = texts()
        return examples(held_out.words, held_out.places[torch.arange(HELD_OUT) * len(held_out.places) // HELD_OUT])

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        before, word = batch
        return classify(model(before), word)


class Text(NamedTuple):
    """A text in words."""

    words: Tensor
    """Their tokens, int64 [words]."""

    places: Tensor
    """Where words stand that are to be predicted, int64."""


@cache
def texts() -> tuple[Text, Text]:
    """Return the training texts, which make the vocabulary, and those held out."""
    train, held_out = (
        re.findall(rb"[A-Za-z]+", text.numpy().tobytes()) for text in (corpus().train, corpus().held_out)
    )
    tokens = {word: token for token, (word, _) in enumerate(Counter(train).most_common(VOCABULARY))}
    return tokenise(train, tokens), tokenise(held_out, tokens)


def tokenise(text: list[bytes], tokens: dict[bytes, int]) -> Text:
    """Look the words up, and find those to be predicted."""
    words = torch.tensor([tokens.get(word, VOCABULARY) for word in text])
    return Text(words, BEFORE + (words[BEFORE:] < FREQUENT).nonzero().flatten())


def examples(words: Tensor, places: Tensor) -> Batch:
    """Return the words before some places [places, BEFORE] and those there [places], int64."""
    return words[places[:, None] + torch.arange(-BEFORE, 0)], words[places]
