"""A causal language model: the example's transformer, without biases, on the example's texts."""

from __future__ import annotations

from model import ByteTransformer, ModelConfig
from torch import Tensor, nn

from .task import Batch, Task
from .texts import held_out_windows, windows

CONFIG = ModelConfig(layers=2, width=96, heads=4, context=64)
SEQUENCES = 16


class ByteLM(Task):
    """Predict the next byte of the standard library's texts. The loss is in nats per byte."""

    name = "byte-lm"
    score = "loss"

    def model(self) -> nn.Module:
        return ByteTransformer(CONFIG)

    def batch(self, seed: int, step: int) -> Batch:
        return windows(SEQUENCES, CONFIG.context, seed, step)

    def held_out(self) -> Batch:
        return held_out_windows(CONFIG.context)

    def measure(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return {"loss": model(*batch)}
