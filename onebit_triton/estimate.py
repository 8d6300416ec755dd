"""Tell beforehand whether compression pays, from a few numbers about a training; nothing is measured or sent.

    python -m onebit_triton.estimate --parameters 340e6 --ranks 16 --bandwidth 1e9 --compute 0.25

The model behind it: with n ranks, N parameters and a link of B bit/s in each direction for every rank, a rank sends

    fp32, and every step of warmup     2 (n-1)/n 4N bytes                      ring all-reduce
    fp16                               2 (n-1)/n 2N bytes                      ring all-reduce
    1-bit                              2 (n-1)/n N/8 bytes, 32 (n-1) a bucket  all-to-all, ring all-gather

which takes 8/B seconds a byte and one latency for each message that waits for another: 2 (n-1) per bucket of an
all-reduce, n per bucket of a compressed exchange. DDP exchanges gradients while backward still computes others, and
what it hides so costs nothing; the momentum can only be exchanged when the gradients are complete:

    fp32, fp16    compute + optimizer + max(0, exchange - overlap compute)
    1-bit         compute + compressed optimizer + exchange

Left out: stragglers, other traffic, the cost of copying (part of `optimizer` if that is measured with an exchange over
a fast network), and links that several ranks share. Those a ring crosses once, and an all-to-all once for each of
them: with g ranks behind one link expect up to (g+1)/2 times the exchange time given here for 1-bit.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass

from .collectives import ring_bytes
from .kernels.tables import HEADER_BYTES

DDP_BUCKET_BYTES = 25 * 2**20
"""DDP's default bucket_cap_mb."""

BUCKET_ELEMENTS = 4 * 2**20
"""OneBitLamb's default bucket_elements."""

BACKWARD_SHARE = 2 / 3
"""Backward computes two gradients for each product of forward."""


def compressed_bytes(elements: int, ranks: int, buckets: int = 1) -> int:
    """Bytes that a rank sends in a compressed step.

    Args:
        elements: over all buckets; with the padding (a multiple of 8 ranks) the result is exact, without it a little
            low.
        ranks: n.
        buckets: messages per destination and exchange, each with a header.
    """
    return 2 * (ranks - 1) * (buckets * HEADER_BYTES + elements // (8 * ranks))


@dataclass(frozen=True)
class Cost:
    """One way to exchange.

    Attributes:
        sent: bytes that a rank sends in a step.
        exchange: seconds on the wire.
        step: seconds of a whole step.
    """

    sent: int
    exchange: float
    step: float


@dataclass(frozen=True)
class Estimate:
    """What a step costs under DDP in fp32, under DDP in fp16, and in compression; and what follows.

    Attributes:
        fp32, fp16, onebit: the costs; a step of warmup costs what fp32 does.
        warmup: share of the steps that are warmup.
        pays_below_fp32, pays_below_fp16: bandwidth in bit/s below which a compressed step is the faster one; inf if it
            always is, 0 if it never is.
    """

    fp32: Cost
    fp16: Cost
    onebit: Cost
    warmup: float
    pays_below_fp32: float
    pays_below_fp16: float

    def step_speedup(self, rival: Cost) -> float:
        """Times that a compressed step is faster than a rival's."""
        return rival.step / self.onebit.step

    def training_speedup(self, rival: Cost) -> float:
        """Times that a whole training is faster than a rival's, warmup included."""
        return rival.step / (self.warmup * self.fp32.step + (1 - self.warmup) * self.onebit.step)


def estimate(
    parameters: int,
    ranks: int,
    bandwidth: float,
    compute: float,
    optimizer: float = 0.0,
    compressed_optimizer: float | None = None,
    latency: float = 0.0,
    overlap: float | None = None,
    warmup: float = 1 / 6,
) -> Estimate:
    """Estimate step times of data-parallel training with and without compression.

    Args:
        parameters: N, elements of the model.
        ranks: n.
        bandwidth: of each rank's link, in each direction, bit/s; better what a plain transfer reaches (iperf) than the
            nominal rate.
        compute: seconds of forward and backward of one step.
        optimizer: seconds of a LAMB step, exchange excluded.
        compressed_optimizer: seconds of a compressed step's passes; None: as `optimizer`, since both move about as
            many bytes of memory.
        latency: seconds of one message.
        overlap: share of `compute` that DDP exchanges behind. None: backward, 2/3 of it, from where the first 25 MiB
            of gradients, a bucket of DDP's, are complete.
        warmup: share of the steps that are warmup.

    Raises:
        ValueError: naming the argument, the rule and the value.
    """
    _check_whole("parameters", parameters, 1)
    _check_whole("ranks", ranks, 2)
    if compressed_optimizer is None:
        compressed_optimizer = optimizer
    if overlap is None:
        overlap = BACKWARD_SHARE * max(0.0, 1 - DDP_BUCKET_BYTES / (4 * parameters))
    for name, seconds in (
        ("compute", compute),
        ("optimizer", optimizer),
        ("compressed_optimizer", compressed_optimizer),
        ("latency", latency),
    ):
        _check(name, seconds, "a finite number of seconds >= 0", 0 <= seconds < math.inf)
    _check("bandwidth", bandwidth, "a finite number of bit/s > 0", 0 < bandwidth < math.inf)
    _check("overlap", overlap, "in [0, 1]", 0 <= overlap <= 1)
    _check("warmup", warmup, "in [0, 1]", 0 <= warmup <= 1)

    hidden = overlap * compute
    ddp_buckets, buckets = -(-4 * parameters // DDP_BUCKET_BYTES), -(-parameters // BUCKET_ELEMENTS)
    waiting, waiting_onebit = 2 * (ranks - 1) * ddp_buckets * latency, ranks * buckets * latency
    sent_onebit = compressed_bytes(parameters, ranks, buckets)
    exchange_onebit = 8 * sent_onebit / bandwidth + waiting_onebit
    onebit = Cost(sent_onebit, exchange_onebit, compute + compressed_optimizer + exchange_onebit)
    behind = compressed_optimizer + waiting_onebit - optimizer

    def rival(element_bytes: int) -> tuple[Cost, float]:
        sent = ring_bytes(parameters, ranks, element_bytes)
        exchange = 8 * sent / bandwidth + waiting
        cost = Cost(sent, exchange, compute + optimizer + max(0.0, exchange - hidden))
        return cost, _pays_below(sent, sent_onebit, behind, waiting - hidden)

    (fp32, below_fp32), (fp16, below_fp16) = rival(4), rival(2)
    return Estimate(fp32, fp16, onebit, warmup, below_fp32, below_fp16)


def _check_whole(name: str, value: object, least: int) -> None:
    _check(name, value, f"an integer >= {least}", isinstance(value, int) and value >= least)


def _check(name: str, value: object, rule: str, holds: bool) -> None:
    if not holds:
        raise ValueError(f"Invalid {name}={value!r}. Must be {rule}.")


def _pays_below(sent: int, sent_onebit: int, behind: float, shown: float) -> float:
    """Bandwidth in bit/s below which a compressed step is faster than a rival's.

    At x seconds per bit a rival's step is longer by max(0, 8 sent x + shown) - 8 sent_onebit x - behind. That is the
    larger of a line that rises with x and one that falls. So compression pays from where the rising line is zero on;
    if the falling one is still positive there, it pays everywhere.

    Args:
        sent: bytes of the rival.
        sent_onebit: bytes of a compressed step.
        behind: seconds that compression loses over an infinitely fast link if the rival's exchange is hidden.
        shown: seconds of the rival's exchange, over such a link, that are not hidden; negative if more could be.
    """
    if sent <= sent_onebit:
        return 0.0
    start = (behind - shown) / (8 * (sent - sent_onebit))
    if start <= 0 or 8 * sent_onebit * start + behind < 0:
        return math.inf
    return 1 / start


def report(found: Estimate) -> str:
    """A table of an estimate, and the conclusion."""
    rows = [("", "MB sent per rank", "exchange ms", "step ms", "1-bit is, per step", "per training")]
    for name, cost in (("fp32", found.fp32), ("fp16", found.fp16), ("1-bit", found.onebit)):
        numbers = (f"{cost.sent / 1e6:,.2f}", f"{1e3 * cost.exchange:,.1f}", f"{1e3 * cost.step:,.1f}")
        gains = (f"{found.step_speedup(cost):.2f}x", f"{found.training_speedup(cost):.2f}x")
        rows.append((name, *numbers, *(gains if cost is not found.onebit else ("", ""))))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.append(f"Per training: with {found.warmup:.0%} of the steps in warmup, which cost what fp32 does.")
    for name, cost, below in (
        ("fp32", found.fp32, found.pays_below_fp32),
        ("fp16", found.fp16, found.pays_below_fp16),
    ):
        verdict = "pays" if found.step_speedup(cost) > 1 else "does not pay"
        limit = "at any bandwidth" if math.isinf(below) else f"below {below / 1e9:,.3g} Gbit/s" if below else "nowhere"
        lines.append(f"Against {name} compression {verdict} here; by this model it pays {limit}.")
    return "\n".join(lines)


def _integer(text: str) -> int:
    """An integer, 340e6 allowed."""
    value = float(text)
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"must be an integer, got {text}")
    return int(value)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and write the report to stdout."""
    parser = argparse.ArgumentParser(
        prog="python -m onebit_triton.estimate",
        description="Estimate whether 1-bit LAMB's compression pays.",
    )
    parser.add_argument("--parameters", type=_integer, required=True, help="elements of the model, such as 340e6")
    parser.add_argument("--ranks", type=int, required=True, help="processes that share the training")
    parser.add_argument("--bandwidth", type=float, required=True, help="of each rank's link, bit/s, such as 1e9")
    parser.add_argument("--compute", type=float, required=True, help="seconds of forward and backward")
    parser.add_argument("--optimizer", type=float, default=0.0, help="seconds of a LAMB step (default: 0)")
    parser.add_argument("--compressed-optimizer", type=float, help="of a compressed step (default: as --optimizer)")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds of one message (default: 0)")
    parser.add_argument("--overlap", type=float, help="share of --compute that DDP exchanges behind")
    parser.add_argument("--warmup", type=float, default=1 / 6, help="share of the steps (default: 1/6)")
    options = parser.parse_args(arguments)
    try:
        found = estimate(**vars(options))
    except ValueError as error:
        parser.error(str(error))
    sys.stdout.write(report(found) + "\n")


if __name__ == "__main__":
    main()
