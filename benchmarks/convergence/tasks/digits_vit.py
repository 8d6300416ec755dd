"""A vision transformer (Dosovitskiy et al., 2020): pre-norm, patches of 2x2 pixels, mean pooling."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .digits import CLASSES, PIXELS, Digits

PATCH = 2
LAYERS, WIDTH, HEADS = 2, 64, 4


class VisionTransformer(nn.Module):
    """A small vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.5 * torch.randn((PIXELS // PATCH) ** 2, WIDTH))
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
                )
                for _ in range(LAYERS)
            )
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Map images, float [images, 1, PIXELS, PIXELS], to logits [images, CLASSES]."""
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.layers(x)).mean(1))


class DigitsViT(Digits):
    """Digits by attention."""

    name = "digits-vit"

    def model(self) -> nn.Module:
        return VisionTransformer()
