"""Real processes for distributed tests: kept between tests, a fresh gloo process group for each call."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT = 270.0
"""Seconds that one call may take before its processes are killed."""


class RankError(AssertionError):
    """A rank raised; the message has its traceback."""


def _serve(connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    from . import interpreter  # noqa: F401

    torch.set_num_threads(1)
    while True:
        task = connection.recv()
        if task is None:
            return
        function, rank, ranks, store, args = task
        try:
            dist.init_process_group(
                "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks,
                timeout=datetime.timedelta(seconds=60),
            )  # fmt: skip
            try:
                dist.barrier()  # a rank that is done at once would close on one that still connects
                result = (True, function(rank, ranks, *args))
            finally:
                dist.destroy_process_group()
        except BaseException:
            result = (False, traceback.format_exc())
        connection.send(result)


class RankPool:
    """Processes that run functions as ranks of a gloo group."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []

    def __call__(self, ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """function(rank, ranks, *args) on every rank; what each returned (arrays, numbers: anything that pickles).

        Raises:
            RankError: if a rank raised or the call took longer than `TIMEOUT`.
        """
        while len(self._workers) < ranks:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._workers.append((process, ours))
        with tempfile.TemporaryDirectory() as folder:
            store = os.path.join(folder, "store")
            for rank in range(ranks):
                self._workers[rank][1].send((function, rank, ranks, store, args))
            results = self._collect(ranks)
        errors = [f"rank {rank}:\n{value}" for rank, (fine, value) in enumerate(results) if not fine]
        if errors:
            raise RankError("\n".join(errors))
        return [value for _, value in results]

    def _collect(self, ranks: int) -> list[tuple[bool, Any]]:
        deadline = time.monotonic() + TIMEOUT
        results: list[tuple[bool, Any]] = []
        for rank in range(ranks):
            connection = self._workers[rank][1]
            if connection.poll(max(0.0, deadline - time.monotonic())):
                results.append(connection.recv())
            else:
                results.append((False, f"no answer in {TIMEOUT} s"))
        if not all(fine for fine, _ in results):
            self.close()  # a rank may still be stuck in a collective
        return results

    def close(self) -> None:
        """Kill all processes."""
        for process, _ in self._workers:
            process.kill()
            process.join()
        self._workers.clear()
