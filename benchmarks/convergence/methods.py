"""What is compared: from the gradients of n ranks to a step, and the bytes that a rank would send for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from onebit_triton import OneBitLamb
from onebit_triton.collectives import ring_bytes

from .local_ranks import Replicas

Gradients = Sequence[Tensor]
"""Of one rank, one per parameter."""

NEVER = 10**9
"""A freeze step that no training reaches: LAMB."""


class Average(Protocol):
    """Averages gradients over ranks, as exactly as a method does."""

    def __call__(self, ranks: list[Gradients]) -> list[Tensor]:
        """The average, one tensor per parameter."""

    def sent(self, params: Sequence[Tensor], ranks: int) -> int:
        """Bytes that a rank sends for it."""


class Cast:
    """Sums in a dtype of gradients that were divided before, as DDP and its fp16 hook do.

    Args:
        dtype: what is sent.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __call__(self, ranks: list[Gradients]) -> list[Tensor]:
        """Divide, then add up in rank order."""
        averages = []
        for grads in zip(*ranks, strict=True):
            total = torch.zeros_like(grads[0], dtype=self._dtype)
            for grad in grads:
                total += grad.to(self._dtype) / len(ranks)
            averages.append(total.to(grads[0].dtype))
        return averages

    def sent(self, params: Sequence[Tensor], ranks: int) -> int:
        """A ring all-reduce."""
        return ring_bytes(sum(p.numel() for p in params), ranks, self._dtype.itemsize)


class PowerSGD:
    """Averages matrices in low rank with error feedback, vectors exactly (Vogels et al., arXiv 1905.13727, alg. 1, 2).

    Tensors of more dimensions are matrices over their first one. Q is kept from step to step. Like torch's hook, which
    a test compares it with.

    Args:
        rank: of the approximation.
        seed: of the first Q.
    """

    def __init__(self, rank: int, seed: int = 0) -> None:
        self._rank = rank
        self._generator = torch.Generator().manual_seed(seed)
        self._q: dict[int, Tensor] = {}
        self._errors: dict[tuple[int, int], Tensor] = {}

    def _low(self, shape: Sequence[int]) -> tuple[int, int, int] | None:
        """Rows, columns and rank where a tensor is sent in low rank; None where that would not be less."""
        if len(shape) < 2:
            return None
        rows, columns = shape[0], int(torch.Size(shape).numel() // shape[0])
        rank = min(rows, columns, self._rank)
        return (rows, columns, rank) if (rows + columns) * rank < rows * columns else None

    def __call__(self, ranks: list[Gradients]) -> list[Tensor]:
        """One power iteration from the last Q."""
        averages = []
        for number, grads in enumerate(zip(*ranks, strict=True)):
            low = self._low(grads[0].shape)
            if low is None:
                averages.append(torch.stack(list(grads)).mean(0))
                continue
            rows, columns, rank = low
            matrices = [grad.view(rows, columns) + self._errors.get((number, i), 0.0) for i, grad in enumerate(grads)]
            if number not in self._q:
                self._q[number] = torch.linalg.qr(torch.randn(columns, rank, generator=self._generator)).Q
            p = torch.linalg.qr(torch.stack([m @ self._q[number] for m in matrices]).mean(0)).Q
            self._q[number] = torch.stack([m.T @ p for m in matrices]).mean(0)
            average = p @ self._q[number].T
            for i, matrix in enumerate(matrices):
                self._errors[number, i] = matrix - average
            averages.append(average.view(grads[0].shape))
        return averages

    def sent(self, params: Sequence[Tensor], ranks: int) -> int:
        """Ring all-reduces of both factors, and of what is not in low rank."""
        lows = [self._low(p.shape) for p in params]
        elements = sum(
            p.numel() if low is None else (low[0] + low[1]) * low[2] for p, low in zip(params, lows, strict=True)
        )
        return ring_bytes(elements, ranks, 4)


class Method(Protocol):
    """A way to train."""

    def step(self, gradients: list[Gradients], lr: float) -> None:
        """Take one step with the gradients of every rank."""

    @property
    def bytes_sent(self) -> int:
        """By one rank, so far."""

    @property
    def optimizer(self) -> OneBitLamb:
        """That of rank 0."""


class Averaging:
    """LAMB in one process, on gradients that are averaged in some way.

    Args:
        params: what is trained.
        ranks: whose gradients come.
        average: how they are averaged.
        options: of the optimizer.
    """

    def __init__(self, params: list[torch.nn.Parameter], ranks: int, average: Average, **options: Any) -> None:
        self._params, self._average = params, average
        self.optimizer = OneBitLamb(params, **options | {"freeze_step": NEVER})
        self._step_bytes, self.bytes_sent = average.sent(params, ranks), 0

    def step(self, gradients: list[Gradients], lr: float) -> None:
        """Average, then step."""
        for param, grad in zip(self._params, self._average(gradients), strict=True):
            param.grad = grad
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        self.bytes_sent += self._step_bytes


class OneBit:
    """OneBitLamb on n ranks.

    Args:
        params: what is trained.
        ranks: how many.
        options: of the optimizer.
    """

    def __init__(self, params: list[torch.nn.Parameter], ranks: int, **options: Any) -> None:
        self._replicas = Replicas(params, ranks, lambda own: OneBitLamb(own, **options))

    @property
    def optimizer(self) -> OneBitLamb:
        """That of rank 0."""
        return self._replicas.optimizers[0]

    def step(self, gradients: list[Gradients], lr: float) -> None:
        """Step on all ranks."""
        for optimizer in self._replicas.optimizers:
            optimizer.param_groups[0]["lr"] = lr
        self._replicas.step(gradients)

    @property
    def bytes_sent(self) -> int:
        """As the optimizer counts them."""
        return sum(self.optimizer.bytes_sent.values())


METHODS: dict[str, Callable[..., Method]] = {
    "lamb": lambda params, ranks, **options: Averaging(params, ranks, Cast(torch.float32), **options),
    "lamb-fp16": lambda params, ranks, **options: Averaging(params, ranks, Cast(torch.float16), **options),
    "lamb-powersgd4": lambda params, ranks, **options: Averaging(params, ranks, PowerSGD(4), **options),
    "onebit": OneBit,
    "onebit-deepspeed": lambda params, ranks, **options: OneBit(
        params, ranks, **options | {"coeff_bias_correction": False}
    ),
}
"""Name -> (parameters, ranks, options of the optimizer) -> method."""
