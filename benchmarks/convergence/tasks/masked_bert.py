"""A masked language model over bytes, after BERT (Devlin et al., 2018): post-norm, biases everywhere, a tied head."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .task import Batch, Task, classify, draws
from .texts import BYTES, held_out_windows, windows

MASK = BYTES
"""The token that stands for a hidden byte."""

LAYERS, WIDTH, HEADS, CONTEXT = 2, 96, 4, 64
SEQUENCES = 16

CHOSEN = round(0.15 * CONTEXT)
"""Positions to be guessed in every sequence, so that all shares of a batch weigh the same."""

MASKED, REPLACED = 0.8, 0.1
"""Of the chosen positions; the rest keep their byte."""


class ByteBert(nn.Module):
    """A small BERT over bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(BYTES + 1, WIDTH)
        self.position_embedding = nn.Embedding(CONTEXT, WIDTH)
        self.embedding_norm = nn.LayerNorm(WIDTH)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True)
                for _ in range(LAYERS)
            )
        )
        self.head = nn.Linear(WIDTH, WIDTH)
        self.head_norm = nn.LayerNorm(WIDTH)
        self.bias = nn.Parameter(torch.zeros(BYTES + 1))
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return logits for some positions.

        Args:
            tokens: int64 [sequences, CONTEXT], with `MASK` among them.
            positions: int64 [sequences, chosen], those to be guessed.

        Returns:
            float [sequences, chosen, BYTES + 1].
        """
        x = self.layers(self.embedding_norm(self.token_embedding(tokens) + self.position_embedding.weight))
        x = x.take_along_dim(positions[:, :, None], 1)
        x = self.head_norm(functional.gelu(self.head(x)))
        return functional.linear(x, self.token_embedding.weight, self.bias)


class MaskedBert(Task):
    """Guess hidden bytes of the standard library's texts. The loss is in nats per hidden byte."""

    name = "masked-bert"
    score = "loss"

    def model(self) -> nn.Module:
        return ByteBert()

    def batch(self, seed: int, step: int) -> Batch:
        text, _ = windows(SEQUENCES, CONTEXT, seed, step)
        return hide(text, draws(seed, step))

    def held_out(self) -> Batch:
        text, _ = held_out_windows(CONTEXT)
        return hide(text, torch.Generator().manual_seed(0))

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        tokens, positions, targets = batch
        return classify(model(tokens, positions), targets)


def hide(text: Tensor, generator: torch.Generator) -> Batch:
    """Hide bytes as BERT does.

    Args:
        text: int64 [sequences, CONTEXT].
        generator: draws the positions and what becomes of them.

    Returns:
        Tokens [sequences, CONTEXT]; the chosen positions, and the bytes there, [sequences, CHOSEN] each. All int64.
    """
    positions = torch.rand(text.shape, generator=generator).argsort(1)[:, :CHOSEN]
    targets = text.take_along_dim(positions, 1)
    fate = torch.rand(targets.shape, generator=generator)
    anything = torch.randint(BYTES, targets.shape, generator=generator)
    shown = torch.where(fate < MASKED + REPLACED, anything, targets).masked_fill(fate < MASKED, MASK)
    return text.scatter(1, positions, shown), positions, targets
