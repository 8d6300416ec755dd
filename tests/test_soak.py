"""`python -m tests.soak` in a few seconds, and that it would find what it is for."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from . import soak
from .ranks import RankPool
from .soak import Part, Soak, digest, disturbed, grown, problems


@pytest.mark.slow
@pytest.mark.distributed
def test_a_short_soak(ranks: RankPool) -> None:
    """Every kind of disturbance once, on two ranks and on one; replicas, states and counts are checked on the way."""
    parts = [
        Part(0, 5, 2, ddp=True, bad=((1, 1),), slow=(3, 4)),
        Part(5, 10, 2, missing=((6, 0, 3), (8, 1, 0)), rewarm=(7,), portable=True),
        Part(10, 14, 1, portable=True, bad=((12, 0),)),
        Part(14, 20, 2, ddp=True, missing=((15, 1, 2),), portable=True),
    ]
    training = Soak(ranks, 20, seed=3)
    training.run(parts)
    assert len(training.losses) == 20
    assert training.losses[-1] < training.losses[0] - 0.3
    assert 3.0 < training.held_out < training.losses[0]


def test_the_schedule_follows_from_the_seed() -> None:
    parts = disturbed(2000, 4, 50, seed=5)
    assert parts == disturbed(2000, 4, 50, seed=5) != disturbed(2000, 4, 50, seed=6)
    assert [part.first for part in parts] == list(range(0, 2000, 50))
    for part, following in pairwise(parts):
        assert part.last == following.first
        assert part.portable or part.ranks == following.ranks
    for kind in ("ddp", "portable", "fresh", "bad", "missing", "rewarm", "slow"):
        assert any(getattr(part, kind) for part in parts), kind
    assert {part.ranks for part in parts} == {1, 2, 3, 4}


def sample(memory: int, files: int = 20, threads: int = 8) -> dict[str, int]:
    return {"memory": memory, "files": files, "threads": threads}


def test_what_grows_is_found() -> None:
    steady = [sample(m) for m in (300_000, 390_000, 400_000, 402_000, 399_000, 405_000, 401_000, 404_000, 403_000)]
    assert list(grown({7: steady})) == []
    leaking = [sample(400_000 + 4000 * n) for n in range(14)]
    assert ["memory of process 7" in found for found in grown({7: leaking})] == [True]
    for key in ("files", "threads"):
        leaking = [sample(400_000, **{key: 20 + n}) for n in range(14)]
        assert [f"{key} of process 7" in found for found in grown({7: leaking})] == [True]


def test_a_loss_that_ends_elsewhere_is_found() -> None:
    plain = Soak(RankPool(), 40, seed=0)
    plain.losses, plain.held_out = [5.0 - 0.05 * step for step in range(40)], 3.0
    shaken = Soak(RankPool(), 40, seed=0)
    shaken.losses, shaken.held_out = plain.losses, 3.0 + 2 * soak.BAND
    assert ["held-out loss ends at" in found for found in problems(plain, shaken)] == [True]
    shaken.losses, shaken.held_out = [5.0] * 40, 3.0
    assert ["loss fell from 5.000 to 5.000 only" in found for found in problems(plain, shaken)] == [True]


def test_digest_sees_every_bit() -> None:
    state = {"state": {0: {"m": torch.zeros(3), "k": 1}}, "param_groups": [{"lr": 0.1}]}
    seen = {digest(state)}
    for change in ({"m": torch.tensor([0.0, -0.0, 0.0]), "k": 1}, {"m": torch.zeros(3), "k": 2}):
        seen.add(digest(state | {"state": {0: change}}))
    assert len(seen) == 3
