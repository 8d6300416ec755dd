"""A recurrent language model: a GRU over bytes, through time for the length of a window."""

from __future__ import annotations

from torch import Tensor, nn

from .task import Batch, Task, classify
from .texts import BYTES, held_out_windows, windows

EMBEDDED, HIDDEN, CONTEXT = 64, 128, 48
SEQUENCES = 16


class ByteGRU(nn.Module):
    """Predicts the next byte; the hidden state is zero where a window begins."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, EMBEDDED)
        self.gru = nn.GRU(EMBEDDED, HIDDEN, batch_first=True)
        self.head = nn.Linear(HIDDEN, BYTES)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map int64 [sequences, CONTEXT] to logits, float [sequences, CONTEXT, BYTES]."""
        states, _ = self.gru(self.embedding(tokens))
        return self.head(states)


class Recurrent(Task):
    """Predict the next byte of the standard library's texts. The loss is in nats per byte."""

    name = "recurrent"
    score = "loss"

    def model(self) -> nn.Module:
        return ByteGRU()

    def batch(self, seed: int, step: int) -> Batch:
        return windows(SEQUENCES, CONTEXT, seed, step)

    def held_out(self) -> Batch:
        return held_out_windows(CONTEXT)

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        tokens, targets = batch
        return classify(model(tokens), targets)
