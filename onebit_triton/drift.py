"""Whether replicas are still bit-identical: every rank's hash of every tensor that must be the same on all of them.

They are by construction; what can part them is a bad memory cell, a parameter that was written on one rank alone, or
ranks that run different builds.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import Tensor

from .hashing import hash_bits, words_of
from .kernels.tables import flat
from .stages import Compression, Replica, Uncompressed, Warmup
from .stages.switch import dense_momentum


def find_difference(replica: Replica, stage: Warmup | Uncompressed | Compression) -> str | None:
    """Compare all replicas (collective: one small all-gather, and two more if they differ).

    Returns:
        None, or on every rank the same sentence that names the first tensor that differs, the ranks, and where.
    """
    found = [hash_bits(tensor) for _, tensor in _replicated(replica, stage)]
    hashes = torch.stack(found).tolist() if found else []
    rows = torch.tensor(replica.communicator.gather_numbers(hashes), dtype=torch.int64)
    differ = (rows != rows[:1]).any(0).nonzero()
    if not len(differ):
        return None
    number = int(differ[0])
    name, mine = next(islice(_replicated(replica, stage), number, None))
    odd = (rows[:, number] != rows[0, number]).nonzero().flatten().tolist()
    others = f"; {len(differ) - 1} more differ" if len(differ) > 1 else ""
    return f"{name} of rank {odd[0]} is not that of rank 0: {_where(replica, mine, odd[0])}{others}."


def repair(replica: Replica, stage: Warmup | Uncompressed | Compression) -> None:
    """Give every rank what rank 0 has; pending errors, which belong to ranks, stay (collective)."""
    broadcast = replica.communicator.broadcast
    for bucket in replica.buckets:
        for parameter in bucket.parameters:
            broadcast(flat(parameter))
        for state in (bucket.master, bucket.exp_avg, bucket.exp_avg_sq, bucket.exp_avg_sq_fresh):
            if state is not None:
                broadcast(state)
        bucket.note_written()
    if isinstance(stage, Compression):
        for messages in stage.exchange.momentum:
            broadcast(messages)
    broadcast(replica.rates)


def _replicated(replica: Replica, stage: Warmup | Uncompressed | Compression) -> Iterator[tuple[str, Tensor]]:
    """Everything that is the same on all ranks, with what messages call it."""
    for number, (bucket, names) in enumerate(zip(replica.buckets, replica.names, strict=True)):
        states = {
            "the master": bucket.master,
            "exp_avg": dense_momentum(bucket, stage, number),
            "exp_avg_sq": bucket.exp_avg_sq,
            "exp_avg_sq_fresh": bucket.exp_avg_sq_fresh,
        }
        for row, (parameter, name) in enumerate(zip(bucket.parameters, names, strict=True)):
            yield name, parameter.detach()
            for key, state in states.items():
                if state is not None:
                    yield f"{key} of {name}", bucket.views(state)[row]
            yield f"the layer table of {name}", bucket.rates[row]


def _where(replica: Replica, mine: Tensor, odd: int) -> str:
    """From which element on a rank's tensor is not that of rank 0, and both values there; the same on every rank."""
    communicator = replica.communicator
    theirs = flat(mine).clone()
    communicator.broadcast(theirs)
    apart = (words_of(theirs) != words_of(mine)).nonzero()
    at = int(apart[0]) if len(apart) else 0
    first = communicator.gather_numbers([at])[odd][0]
    bits = communicator.gather_numbers([int(words_of(mine)[first])])
    values = [torch.tensor([row[0]]).to(words_of(mine).dtype).view(mine.dtype).item() for row in (bits[odd], bits[0])]
    return f"element {first} is {values[0]!r} there and {values[1]!r} here"
