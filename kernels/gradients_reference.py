"""Plain-torch twins of gradients.py."""

from __future__ import annotations

from torch import Tensor

from .tables import BlockMap, TensorTable


def flatten_gradients_reference(grads: TensorTable, blocks: BlockMap, out: Tensor, ranks: int) -> None:
    """Twin of `flatten_gradients`."""
    g = grads.gather(blocks)
    out.copy_((g / g.new_full((), ranks)).view(-1))  # by a number, CUDA would multiply by the reciprocal


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum of squares of every block, [blocks], of x [blocks, B]."""
    return (x * x).sum(1)


def gradient_norms_reference(grads: TensorTable, blocks: BlockMap, partials: Tensor) -> None:
    """Twin of `gradient_norms`."""
    partials.copy_(sum_of_squares(grads.gather(blocks)))
