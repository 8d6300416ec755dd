"""Gradients averaged in 8 bits during warmup: floats of 8 bits with a scale for every 256 elements."""

from __future__ import annotations

import torch
from torch import Tensor

from .collectives import Communicator
from .collectives import Work as Work

DTYPE = torch.float8_e4m3fn
"""4 bits of exponent, 3 of mantissa: relative rounding errors of at most 1/16, over five decades below the scale."""

BLOCK = 256
"""Elements that share a scale, fp32: 1.6 % of what is sent."""

_LARGEST, _TINY = torch.finfo(DTYPE).max, torch.finfo(torch.float32).tiny


def encode(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Round to 8 bits. What is not finite makes the whole block NaN.

    Args:
        values: fp32 [..., BLOCK].
        codes: float8 [..., BLOCK], written.
        scales: fp32 [..., 1], written.
    """
    scales.copy_(values.abs().amax(-1, keepdim=True).div_(_LARGEST).clamp_(min=_TINY))
    codes.copy_(values / scales)


def decode(codes: Tensor, scales: Tensor) -> Tensor:
    """What was encoded, fp32 [..., BLOCK]."""
    return codes.float() * scales


class EightBitAllReduce:
    """Sum of a flat tensor over ranks: all-to-all, sum in fp32 in rank order, all-gather; rounded before either.

    All ranks get the same bits. The three steps are apart so that several sums can be under way at once.

    Args:
        communicator: the group.
        elements: of the tensor.
        numbers: fp32 numbers that every rank sends along to all others.
        device: of the tensor.
    """

    def __init__(self, communicator: Communicator, elements: int, numbers: int, device: torch.device) -> None:
        self._communicator, self._elements = communicator, elements
        ranks = communicator.ranks
        self._chunk = max(1, -(-elements // (ranks * BLOCK))) * BLOCK  # views need a block at least
        coded = self._chunk + self._chunk // BLOCK * 4
        self._sent = torch.zeros(ranks, coded + 4 * numbers, dtype=torch.uint8, device=device)
        self._received = torch.zeros_like(self._sent)
        self._server = torch.zeros(coded, dtype=torch.uint8, device=device)
        self._gathered = torch.zeros(ranks, coded, dtype=torch.uint8, device=device)
        self._numbers = self._received[:, coded:].view(torch.float32)
        self._own_numbers = self._sent[:, coded:].view(torch.float32)
        self._work: Work

    def _parts(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, float8 [..., blocks, BLOCK], and scales, fp32 [..., blocks, 1], within messages."""
        blocks = self._chunk // BLOCK
        codes = messages[..., : self._chunk].view(DTYPE)
        scales = messages[..., self._chunk : self._chunk + blocks * 4].view(torch.float32)
        return codes.unflatten(-1, (blocks, BLOCK)), scales.unsqueeze(-1)

    def start(self, values: Tensor, numbers: Tensor) -> None:
        """Send.

        Args:
            values: [elements], of any dtype.
            numbers: fp32 [numbers].
        """
        padding = self._sent.shape[0] * self._chunk - self._elements
        padded = torch.nn.functional.pad(values.float(), (0, padding)).view(self._sent.shape[0], -1, BLOCK)
        encode(padded, *self._parts(self._sent))
        self._own_numbers.copy_(numbers.expand_as(self._own_numbers))
        self._work = self._communicator.all_to_all(self._received, self._sent)

    def add_up(self) -> None:
        """Wait for all ranks' shares of this rank's part, add them up, and send the sum."""
        self._work.wait()
        codes, scales = self._parts(self._received)
        total = decode(codes[0], scales[0])
        for rank in range(1, codes.shape[0]):
            total += decode(codes[rank], scales[rank])
        encode(total, *self._parts(self._server))
        self._work = self._communicator.all_gather(self._gathered, self._server)

    def finish(self, out: Tensor) -> Tensor:
        """Wait for the sum.

        Args:
            out: [elements], of any dtype, written.

        Returns:
            Every rank's numbers, fp32 [ranks, numbers], valid until the next `start`.
        """
        self._work.wait()
        out.copy_(decode(*self._parts(self._gathered)).view(-1)[: self._elements])
        return self._numbers

    def held(self) -> list[Tensor]:
        """Every buffer, for counting memory."""
        return [self._sent, self._received, self._server, self._gathered]
