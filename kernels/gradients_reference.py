"""Plain-torch twins of gradients.py."""

from __future__ import annotations

from torch import Tensor

from .tables import BlockMap, TensorTable


def flatten_gradients_reference(grads: TensorTable, blocks: BlockMap, out: Tensor, ranks: int) -> None:
    """Twin of `flatten_gradients`."""
    out.copy_((grads.gather(blocks) / ranks).view(-1))


def gradient_norms_reference(grads: TensorTable, blocks: BlockMap, partials: Tensor) -> None:
    """Twin of `gradient_norms`."""
    partials.copy_(grads.gather(blocks).square_().sum(1))
