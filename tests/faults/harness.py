"""Trainings over real processes in which one rank is made to fail, and what became of every rank.

A training is always the same `SCRIPT` of operations. A cell says which fault befalls which rank at which moment: a
fault is a function that runs in that rank, a moment an operation of the script and what is being done in it, by the
names that errors have for it. Cells run side by side, so that they wait for their time-outs together.
"""

from __future__ import annotations

import datetime
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.append(str(EXAMPLES))
checkpoints: Any = importlib.import_module("checkpoints")

SCRIPT = (
    "construct", "step", "save", "step", "step", "step", "step", "save", "step", "check_replicas", "rewarm", "step",
    "load", "step",
)  # fmt: skip
"""Operations of a training. Warmup are the first three steps, and the one after `rewarm`; then comes compression."""

PRELOADED = ("torch._dynamo", "torch.nn.parallel", "torch.distributed.checkpoint", "onebit_triton")
"""Modules that ranks find imported. torch.optim imports the first of them when an optimizer is made."""

DEADLINE = 60.0
"""Seconds after which the ranks of a cell that are still running are killed."""


class FaultError(Exception):
    """What a rank raises that is made to raise."""


@dataclass
class Rank:
    """One rank of a training, as faults see it."""

    rank: int
    ranks: int
    folder: Path
    optimizer: Any = None
    model: Any = None
    plain: Any = None
    params: list[Any] = field(default_factory=list)
    steps: int = 0


@dataclass(frozen=True)
class Cell:
    """A fault, where and when it strikes.

    Attributes:
        fault: runs in the faulty rank; None: nothing happens.
        operation: index in `SCRIPT`; doing: name of what is being done there when it strikes.
        rank: which is faulty.
        ddp: whether DistributedDataParallel averages the gradients; else the optimizer does.
        settling: whether the warmup may end by itself; it never does so early.
        store: "file", or "tcp", which rank 0 hosts.
        timeout: of the process group, in seconds.
        ranks: how many; members: who of them trains, over a group of their own; None: all.
    """

    fault: Callable[[Rank], object] | None
    operation: int
    doing: str
    rank: int = 1
    ddp: bool = False
    settling: bool = False
    store: str = "file"
    timeout: float = 20.0
    ranks: int = 3
    members: tuple[int, ...] | None = None


@dataclass
class Outcome:
    """What became of a rank.

    Attributes:
        ended: "finished", "raised", or the name of the signal that ended it.
        error: what it raised, and cause: what that was raised from.
        seconds: from the fault's operation on this rank to the end.
        params: all parameters at the end; history: and after each operation of the script.
        stage: of the optimizer at the end.
    """

    ended: str
    error: str = ""
    cause: str = ""
    seconds: float = 0.0
    params: Any = None
    history: list[Any] = field(default_factory=list)
    stage: str = ""


def build(here: Rank, cell: Cell, group: Any) -> None:
    """Make model and optimizer, the same on every rank."""
    from torch.nn.parallel import DistributedDataParallel

    from onebit_triton import OneBitLamb

    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 4))
    here.plain, here.params = plain, list(plain.parameters())
    warmup: dict[str, Any] = {"freeze_step": "auto", "max_freeze_step": 3} if cell.settling else {"freeze_step": 3}
    here.optimizer = OneBitLamb(
        plain.named_parameters(), lr=0.01, **warmup, betas=(0.9, 0.9), max_grad_norm=1.0, block_elements=64,
        bucket_elements=256, backend="torch", process_group=group,
    )  # fmt: skip
    here.model = plain
    if cell.ddp:
        # Several buckets: some are averaged while gradients of others are still being computed.
        here.model = here.optimizer.attach(DistributedDataParallel(plain, process_group=group, bucket_cap_mb=0.001))


def operate(here: Rank, cell: Cell, number: int, group: Any, strike: Callable[[str], None]) -> None:
    """One operation of the script. Calls strike(name) at the moments that the library does not name itself."""
    name = SCRIPT[number]
    strike(f"before {name}")
    if name == "construct":
        build(here, cell, group)
    elif name == "step":
        here.steps += 1
        torch.manual_seed(1000 * here.steps + (cell.members or range(cell.ranks)).index(here.rank))
        inputs = torch.randn(8, 20)

        def closure() -> Any:
            here.optimizer.zero_grad()
            loss = here.model(inputs).square().mean()
            with struck_in_backward(here.params[2], strike):
                loss.backward()
            strike("gradients")
            return loss

        if cell.ddp:  # the usual loop there; else a closure
            closure()
            here.optimizer.step()
        else:
            here.optimizer.step(closure)
    elif name == "save":
        if cell.members is None:  # the example saves over all ranks
            with struck_in_writing(strike):
                checkpoints.save(here.folder / "checkpoints", number, here.plain, here.optimizer)
    elif name == "load":
        here.optimizer.load_state_dict(here.optimizer.state_dict())
    elif name == "rewarm":
        here.optimizer.rewarm(1)
    else:
        here.optimizer.check_replicas()


@contextmanager
def struck_in_backward(parameter: Any, strike: Callable[[str], None]) -> Iterator[None]:
    """Strike when this parameter's gradient is computed."""
    handle = parameter.register_hook(lambda grad: strike("backward"))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def struck_in_writing(strike: Callable[[str], None]) -> Iterator[None]:
    """Strike when a rank has written its part of a checkpoint, and when rank 0 is about to complete it."""
    write, finish = FileSystemWriter.write_data, FileSystemWriter.finish

    def write_data(self: Any, plan: Any, planner: Any) -> Any:
        written = write(self, plan, planner)
        strike("written")
        return written

    def complete(self: Any, metadata: Any, results: Any) -> None:
        strike("complete")
        finish(self, metadata, results)

    with mock.patch.multiple(FileSystemWriter, write_data=write_data, finish=complete):
        yield


@contextmanager
def strikes(here: Rank, cell: Cell) -> Iterator[Callable[[int, str], None]]:
    """Let the fault strike, once, when its rank reaches its moment; what is yielded tells of moments."""
    from onebit_triton import failures, optimizer
    from onebit_triton.stages import replica

    pending = [cell.fault] if cell.fault is not None and here.rank == cell.rank else []
    operation = -1

    def strike(number: int, name: str) -> None:
        nonlocal operation
        operation = number
        if pending and (number, name) == (cell.operation, cell.doing):
            pending.pop()(here)

    real = failures.doing

    def doing(name: str) -> Any:
        strike(operation, name)
        return real(name)

    with (
        mock.patch.object(failures, "doing", doing),
        mock.patch.object(optimizer, "doing", doing),
        mock.patch.object(replica, "doing", doing),
    ):
        yield strike


def train(here: Rank, cell: Cell, outcome: Outcome) -> None:
    """Go through the script; fills in the outcome as it goes."""
    torch.set_num_threads(1)
    method = f"file://{here.folder}/store"
    if cell.store == "tcp":
        method = f"tcp://127.0.0.1:{(here.folder / 'port').read_text()}"
    timeout = datetime.timedelta(seconds=cell.timeout)
    dist.init_process_group("gloo", init_method=method, rank=here.rank, world_size=cell.ranks, timeout=timeout)
    group = None if cell.members is None else dist.new_group(list(cell.members), timeout=timeout)
    if cell.members is not None and here.rank not in cell.members:
        return
    started = 0.0
    try:
        with strikes(here, cell) as strike:
            for number in range(len(SCRIPT)):
                if number == cell.operation:
                    started = time.monotonic()
                operate(here, cell, number, group, lambda name, number=number: strike(number, name))  # type: ignore[misc]
                outcome.history.append(flat(here.params))
    finally:
        outcome.seconds = time.monotonic() - started
        outcome.params = flat(here.params)
        outcome.stage = here.optimizer.stage if here.optimizer is not None else ""


def flat(params: Sequence[Any]) -> np.ndarray:
    """All parameters as one array."""
    return np.concatenate([p.detach().numpy().ravel() for p in params]) if params else np.zeros(0)


def _rank(rank: int, cell: Cell, folder: Path) -> None:
    os.dup2(os.open(folder / f"output.rank{rank}", os.O_WRONLY | os.O_CREAT), 2)  # gloo and the store complain there
    outcome = Outcome("finished")
    try:
        train(Rank(rank, cell.ranks, folder), cell, outcome)
    except BaseException as error:
        traceback.print_exc()
        outcome = replace(
            outcome, ended="raised", error=f"{type(error).__name__}: {error}", cause=repr(error.__cause__)
        )
    (folder / f"outcome.rank{rank}").write_bytes(pickle.dumps(outcome))
    # As a training script would end; the group is not destroyed, for there may be nobody to say farewell to.
    os._exit(0)


def _run(cells: Sequence[Cell], root: Path) -> list[list[Outcome]]:
    """Run cells side by side; nobody is left."""
    fork = multiprocessing.get_context("fork")
    started = []
    for number, cell in enumerate(cells):
        folder = root / str(number)
        folder.mkdir()
        if cell.store == "tcp":
            (folder / "port").write_text(str(_free_port()))
        ranks = [fork.Process(target=_rank, args=(rank, cell, folder), daemon=True) for rank in range(cell.ranks)]
        for process in ranks:
            process.start()
        started.append(ranks)
    deadline = time.monotonic() + DEADLINE
    for cell, ranks in zip(cells, started, strict=True):
        healthy = [process for rank, process in enumerate(ranks) if rank != cell.rank or cell.fault is None]
        for process in healthy:
            process.join(max(0.0, deadline - time.monotonic()))
        # Whatever the fault did, it has had its time; one that stopped its process left it for us.
        ranks[cell.rank].join(1.0)
        for process in ranks:
            process.kill()
            process.join()
    return [
        [_outcome(root / str(number), rank, process) for rank, process in enumerate(ranks)]
        for number, ranks in enumerate(started)
    ]


def _outcome(folder: Path, rank: int, process: Any) -> Outcome:
    file = folder / f"outcome.rank{rank}"
    if file.exists():
        return pickle.loads(file.read_bytes())
    ended = signal.Signals(-process.exitcode).name if process.exitcode < 0 else f"status {process.exitcode}"
    return Outcome(ended, error=(folder / f"output.rank{rank}").read_text()[-2000:])


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(connection: Connection) -> None:
    """Import what takes long, once; then fork the ranks of whatever cells arrive."""
    for module in PRELOADED:
        importlib.import_module(module)
    while (task := connection.recv()) is not None:
        try:
            result: Any = _run(*task)
        except BaseException:
            result = traceback.format_exc()
        connection.send((result, [child.pid for child in multiprocessing.active_children()]))


class Harness:
    """Runs cells in processes that are forked off one that has imported torch and this package.

    Args:
        folder: for what the ranks write.
    """

    def __init__(self, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._nursery = context.Process(target=_serve, args=(theirs,))
        self._nursery.start()
        self._folder, self._runs = folder, 0
        self._calm: dict[bool, list[Any]] | None = None

    def __call__(self, cells: Sequence[Cell]) -> list[tuple[list[Outcome], Path]]:
        """Outcomes of every rank of every cell, and the folder with what they wrote."""
        root = self._folder / str(self._runs)
        self._runs += 1
        root.mkdir()
        self._connection.send((list(cells), root))
        assert self._connection.poll(2 * DEADLINE), "no answer from the processes of the cells"
        result, left = self._connection.recv()
        assert not isinstance(result, str), result
        assert not left, f"processes are left: {left}"
        return [(outcomes, root / str(number)) for number, outcomes in enumerate(result)]

    def calm(self, ddp: bool) -> list[Any]:
        """Parameters after each operation of a training to which nothing happens, the same on every rank."""
        if self._calm is None:
            self._calm = {}
            kinds = (False, True)
            for kind, (outcomes, _) in zip(kinds, self([Cell(None, 0, "", ddp=ddp) for ddp in kinds]), strict=True):
                for outcome in outcomes:
                    assert outcome.ended == "finished", outcome
                    np.testing.assert_array_equal(outcome.history, outcomes[0].history)
                self._calm[kind] = outcomes[0].history
        return self._calm[ddp]

    def close(self) -> None:
        """End the process that forks."""
        self._connection.send(None)
        self._nursery.join(DEADLINE)
        ended = self._nursery.exitcode
        self._nursery.kill()
        self._nursery.join()
        assert ended == 0
