"""The bytes that every pass reads and writes, as its launcher declares them; a test counts them.

Counted is what grows with the elements or the blocks of a bucket. What grows with its tensors or ranks alone (rows of
the tables, headers) is left out: a few kilobytes that stay in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

BIT = 1 / 8
"""Bytes of a sign."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a pass moves, of which `total` makes a number for one bucket.

    Attributes:
        read, written: for each element of the bucket, padding included.
        block_read, block_written: for each block besides.
    """

    read: float = 0.0
    written: float = 0.0
    block_read: float = 0.0
    block_written: float = 0.0

    def per_element(self, block_elements: int) -> float:
        """Bytes for each element, what there is for each block included."""
        return self.read + self.written + (self.block_read + self.block_written) / block_elements

    def total(self, elements: int, block_elements: int) -> float:
        """Bytes for a bucket of so many elements."""
        return elements * self.per_element(block_elements)


def declared(name: str, ranks: int = 1, param: int = 4, grad: int = 4, momentum: str = "bits") -> Traffic:
    """What one launch of a pass moves.

    Args:
        name: a pass of `backends.PASSES`.
        ranks: number of chunks of the bucket.
        param: bytes of a parameter's element.
        grad: bytes of a gradient's element.
        momentum: where the momentum is: "bits" of the last exchange, "dense" in the first compressed step,
            "uncompressed" on one process.

    Raises:
        KeyError: for a pass that does not exist.
    """
    old = BIT if momentum == "bits" else 4
    served = 1 / ranks
    copy = param if param < 4 else 0  # beside the fp32 master
    return {
        "flatten_gradients": Traffic(grad, grad),
        "gradient_norms": Traffic(grad, 0, 0, 4),
        "decide_averaged": Traffic(block_read=4),
        "clip_local": Traffic(),
        "decide_exchanged": Traffic(),
        "accept_returned": Traffic(),
        "lamb_moments": Traffic(grad + 12, 8, 0, 8),
        "trust_ratio": Traffic(block_read=8),
        "lamb_apply": Traffic(12, 4 + copy),
        "compress_momentum": Traffic(grad + 4 + old, 4 + BIT, 0, 8),
        "seal_worker": Traffic(block_read=8 * ranks),
        "undo_momentum": Traffic(),  # unless the step is skipped
        "reduce_chunk": Traffic(BIT + 4 * served, (4 + BIT) * served, 0, 4 * served),
        "seal_server": Traffic(block_read=4 * served),
        "fresh_variance": {
            "bits": Traffic(2 * BIT + 12, 4 + BIT, 0, 16),
            "dense": Traffic(BIT + 16, 4 + BIT, 0, 16),
            "uncompressed": Traffic(grad + 16, 8, 0, 16),
        }[momentum],
        "soft_threshold_rate": Traffic(block_read=16),
        "compressed_apply": Traffic((4 if momentum == "uncompressed" else BIT) + 8, 4 + copy),
    }[name]


STEPS = {
    "warmup": ("gradient_norms", "decide_averaged", "lamb_moments", "trust_ratio", "lamb_apply"),
    "compression": (
        "compress_momentum", "seal_worker", "decide_exchanged", "reduce_chunk", "seal_server", "accept_returned",
        "fresh_variance", "soft_threshold_rate", "compressed_apply", "undo_momentum",
    ),
    "uncompressed": (
        "gradient_norms", "decide_averaged", "fresh_variance", "soft_threshold_rate", "compressed_apply",
    ),
}  # fmt: skip
"""The passes of a step: in warmup with gradients that are averaged already, in compression on several ranks, on one."""


def step_bytes(stage: str, ranks: int = 1, param: int = 4, grad: int = 4, block_elements: int = 1024) -> float:
    """Bytes that one step moves for each element of a bucket.

    Args:
        stage: a key of `STEPS`.
        ranks: number of chunks of a bucket.
        param: bytes of a parameter's element.
        grad: bytes of a gradient's element.
        block_elements: elements of a block.
    """
    momentum = "uncompressed" if stage == "uncompressed" else "bits"
    return sum(declared(name, ranks, param, grad, momentum).per_element(block_elements) for name in STEPS[stage])
