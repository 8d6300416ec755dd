"""A convolutional network with BatchNorm."""

from __future__ import annotations

from torch import Tensor, nn

from .digits import CLASSES, Digits

CHANNELS = (32, 64, 64)


class ConvNet(nn.Sequential):
    """Three convolutions, each with BatchNorm and ReLU; halves the image before the last, and averages after it.

    Maps images, float [images, 1, PIXELS, PIXELS], to logits [images, CLASSES].
    """

    def __init__(self) -> None:
        first, second, third = CHANNELS
        super().__init__(
            *_convolution(1, first),
            *_convolution(first, second),
            nn.MaxPool2d(2),
            *_convolution(second, third),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(third, CLASSES),
        )


class DigitsCNN(Digits):
    """Digits by convolutions.

    BatchNorm normalises over the share of a rank, as it does in DistributedDataParallel. That one keeps the running
    statistics of rank 0, so only the loss of rank 0 moves them here, where all ranks have one model.
    """

    name = "digits-cnn"

    def model(self) -> nn.Module:
        return ConvNet()

    def loss(self, model: nn.Module, seed: int, step: int, rank: int, ranks: int) -> Tensor:
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        for norm in norms:
            # In training mode that is all it decides. A momentum of 0 would still count the batch.
            norm.track_running_stats = rank == 0
        loss = super().loss(model, seed, step, rank, ranks)
        for norm in norms:
            norm.track_running_stats = True
        return loss


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()
