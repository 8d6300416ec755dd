"""A small pre-norm transformer over bytes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 256


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model.

    The optimizer pads the state of a tensor to whole blocks of 1024 elements, so large tensors waste nothing and
    small vectors do: linear layers without bias, one vector per LayerNorm. The defaults make 1.00M parameters with
    0.5 % of padding.
    """

    layers: int = 2
    width: int = 192
    heads: int = 6
    context: int = 96


class Block(nn.Module):
    """Causal self-attention and a 4x MLP, each behind a LayerNorm and around a residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(config.width, bias=False)
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.attention_out = nn.Linear(config.width, config.width, bias=False)
        self.mlp_norm = nn.LayerNorm(config.width, bias=False)
        self.mlp_in = nn.Linear(config.width, 4 * config.width, bias=False)
        self.mlp_out = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, tokens, width] to the same shape."""
        batch, tokens, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp_out(functional.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))


class ByteTransformer(nn.Module):
    """Predicts the next byte.

    Input and output embeddings are separate tensors. Bytes that never occur in the first steps leave rows of the input
    embedding without any gradient, as rare tokens do in every real vocabulary.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, config.width)
        self.position_embedding = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy in nats per byte, a scalar.

        Args:
            tokens: int64 [batch, tokens].
            targets: the byte after each token, same shape.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())
