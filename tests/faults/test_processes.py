"""A rank dies, stalls, raises, stays away or comes late: what happens on every other rank."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onebit_triton import OneBitLamb

from .harness import Cell, FaultError, Harness, Outcome, Rank, checkpoints

pytestmark = pytest.mark.distributed


def kill(here: Rank) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(here: Rank) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fail(here: Rank) -> None:
    raise FaultError("made to fail")


def sleep(here: Rank) -> None:
    time.sleep(60)


def come_late(here: Rank) -> None:
    time.sleep(1.5)


FIRST, LAST = 3, 6
"""Operations: a step in the midst of the warmup, and one of compression."""

MOMENTS = {
    "construction": Cell(None, 0, "construction"),
    "backward": Cell(None, FIRST, "backward", ddp=True),
    "warmup, closure": Cell(None, FIRST, "closure"),
    "warmup, average": Cell(None, FIRST, "average"),
    "warmup, decide": Cell(None, FIRST, "decide"),
    "warmup, update": Cell(None, FIRST, "update"),
    "warmup, settling": Cell(None, FIRST, "settling", settling=True),
    "warmup with DDP, decide": Cell(None, FIRST, "decide", ddp=True),
    "switch": Cell(None, 4, "switch"),
    "before a warmup step": Cell(None, FIRST, "before step"),
    "before a compressed step": Cell(None, LAST, "before step"),
    "compression, closure": Cell(None, LAST, "closure"),
    "compression, clip": Cell(None, LAST, "clip"),
    "compression, compress": Cell(None, LAST, "compress"),
    "compression, wait for workers": Cell(None, LAST, "wait for workers"),
    "compression, decide": Cell(None, LAST, "decide"),
    "compression, serve": Cell(None, LAST, "serve"),
    "compression, update": Cell(None, LAST, "update"),
    "save": Cell(None, 7, "consolidate_errors"),
    "check_replicas": Cell(None, 9, "check_replicas"),
    "rewarm": Cell(None, 10, "rewarm"),
    "load": Cell(None, 12, "load_state_dict"),
}
"""When: in which operation, and during what."""

WHERE = {
    "construction": ["construction"],
    "backward": ["step 2 (warmup, backward)"],
    "warmup, closure": ["step 2 (warmup"],
    "warmup, average": ["step 2 (warmup"],
    # What the rank owed the others it has sent: they take the step, unless the connection breaks too early.
    "warmup, decide": ["step 2 (warmup", "step 3 (warmup"],
    "warmup, update": ["step 2 (warmup", "step 3 (warmup"],
    "warmup, settling": ["step 2 (warmup, settling)"],
    "warmup with DDP, decide": ["step 2 (warmup", "step 3 (warmup, backward)"],
    # A broadcast: who has what rank 0 sent takes the next step.
    "switch": ["step 3 (warmup, switch)", "step 4 (compression, clip)"],
    "before a warmup step": ["step 2 (warmup"],
    "before a compressed step": ["step 5 (compression, clip)"],
    "compression, closure": ["step 5 (compression, clip)"],
    "compression, clip": ["step 5 (compression, clip)"],
    "compression, compress": ["step 5 (compression, clip)", "step 5 (compression, wait for workers)"],
    "compression, wait for workers": ["step 5 (compression, "],
    "compression, decide": ["step 5 (compression, "],
    "compression, serve": ["step 5 (compression, "],
    "compression, update": ["step 5 (compression, ", "consolidate_errors (after step 5)"],
    "save": ["consolidate_errors (after step 5)"],
    "check_replicas": ["check_replicas (after step 6)"],
    "rewarm": ["rewarm (after step 6)"],
    "load": ["load_state_dict (after step 7)"],
}
"""Where the others notice."""

HALF = {"compression, update"}
"""Moments after which some ranks may have updated some buckets that others have not."""

OUTSIDE = {
    "construction", "backward", "before a warmup step", "before a compressed step", "save", "check_replicas", "rewarm",
    "load",
}  # fmt: skip
"""Moments at which no call of the optimizer is under way, or only about to be: what is raised then it does not see."""

EARLY = [moment for moment, cell in MOMENTS.items() if cell.operation < LAST]
LATE = [moment for moment in MOMENTS if moment not in EARLY]


def run(cells: Harness, fault: Callable[[Rank], object], table: dict[str, Cell]) -> None:
    """Let a fault strike in each of these cells, by moment, and check what becomes of every rank."""
    results = cells([replace(cell, fault=fault) for cell in table.values()])
    for (moment, cell), (outcomes, folder) in zip(table.items(), results, strict=True):
        with blame(f"{fault.__name__} at {moment}"):
            check(replace(cell, fault=fault), moment, outcomes, folder, cells.calm(cell.ddp))


@contextmanager
def blame(cell: str) -> Iterator[None]:
    """Name the cell in what fails."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{cell}: {error}") from error


def check(cell: Cell, moment: str, outcomes: list[Outcome], folder: Path, calm: list[np.ndarray]) -> None:
    """Survivors say who, where and what to do; their parameters are alike, of a whole step; the checkpoint loads."""
    members = cell.members or tuple(range(cell.ranks))
    survivors = [outcomes[rank] for rank in members if rank != cell.rank]
    faulty = outcomes[cell.rank]
    name = f"rank {cell.rank}"
    if cell.members:
        name = f"rank {members.index(cell.rank)} of the group ({name} of all)"
    who = f"{name} did not answer within"
    if cell.store == "tcp":
        who = "the store of the process group does not answer, so that nobody can be asked; rank 0 of all hosts it"
    if cell.fault is fail:
        assert faulty.error == "FaultError: made to fail"
        if moment not in OUTSIDE:
            who = f"{name} raised FaultError in "
    else:
        assert faulty.ended == "SIGKILL", faulty
    for outcome in survivors:
        assert outcome.ended == "raised", outcome
        assert outcome.error.startswith("LostRankError: "), outcome.error
        assert any(f"lost contact in {where}" in outcome.error for where in WHERE[moment]), outcome.error
        assert who in outcome.error, outcome.error
        assert "start again from the last checkpoint" in outcome.error
        assert outcome.cause.startswith("RuntimeError("), outcome.cause
        assert outcome.seconds < cell.timeout + 15, "an error in good time, even on a machine that is busy"
        if moment not in HALF:
            np.testing.assert_array_equal(outcome.params, survivors[0].params)
            whole = calm[max(0, cell.operation - 1) : cell.operation + 2]
            assert any(np.array_equal(outcome.params, params) for params in whole)
    if moment != "construction" and not cell.members:
        loads(folder, 2 if cell.operation <= 7 else 7)


def loads(folder: Path, number: int) -> None:
    """The newest checkpoint is that of this operation, whole, and goes on at another number of ranks."""
    newest = checkpoints.newest(folder / "checkpoints")
    assert newest.name == f"step-{number}"
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 4))
    optimizer = OneBitLamb(model.named_parameters(), backend="torch")
    assert checkpoints.load(newest, model, optimizer) == number
    assert optimizer.stage == ("warmup" if number == 2 else "compression")
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


def at(*moments: str, **options: Any) -> dict[str, Cell]:
    """Cells at these moments."""
    return {moment: replace(MOMENTS[moment], **options) for moment in moments}


every_moment = pytest.mark.parametrize("moments", [EARLY, LATE], ids=["early", "late"])


@every_moment
def test_a_killed_rank_is_named(cells: Harness, moments: list[str]) -> None:
    run(cells, kill, at(*moments))


@every_moment
def test_a_stalled_rank_is_named_after_the_timeout(cells: Harness, moments: list[str]) -> None:
    run(cells, stop, at(*moments, timeout=6.0))


def test_a_rank_that_stays_away_is_named_after_the_timeout(cells: Harness) -> None:
    """Within a call of the optimizer it would be one that has stalled."""
    run(cells, sleep, at(*sorted(OUTSIDE), timeout=6.0))


@every_moment
def test_the_error_of_a_rank_reaches_the_others(cells: Harness, moments: list[str]) -> None:
    run(cells, fail, at(*moments))


@pytest.mark.parametrize("fault", [kill, stop])
def test_the_rank_that_hosts_the_store_is_named(cells: Harness, fault: Callable[[Rank], object]) -> None:
    run(cells, fault, at("warmup, average", "compression, compress", rank=0, store="tcp", timeout=5.0))


def test_ranks_of_a_group_are_named_by_both_numbers(cells: Harness) -> None:
    run(cells, kill, at("warmup, average", "compression, serve", ranks=4, members=(1, 2, 3), rank=3))


@every_moment
def test_a_late_rank_changes_nothing(cells: Harness, moments: list[str]) -> None:
    table = at(*moments)
    results = cells([replace(cell, fault=come_late) for cell in table.values()])
    for (moment, cell), (outcomes, _) in zip(table.items(), results, strict=True):
        for outcome in outcomes:
            assert outcome.ended == "finished", (moment, outcome)
            np.testing.assert_array_equal(outcome.history, cells.calm(cell.ddp))
        assert outcomes[cell.rank].seconds > 1.5


def test_a_crash_while_a_checkpoint_is_written_leaves_the_one_before(cells: Harness) -> None:
    """One rank dies after it has written its part, or rank 0 when all have: the others end, with torch's errors."""
    torn = [Cell(kill, 7, "written"), Cell(kill, 7, "complete", rank=0)]
    for cell, (outcomes, folder) in zip(torn, cells(torn), strict=True):
        assert [o.ended for o in outcomes] == ["SIGKILL" if rank == cell.rank else "raised" for rank in range(3)]
        assert (folder / "checkpoints" / "step-7").exists()
        loads(folder, 2)
