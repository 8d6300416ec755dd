"""The processes of a training, one in each namespace of a network, driven from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .topology import INTERFACE, Network

ROOT = Path(__file__).parents[2]

ENVIRONMENT = {
    "MASTER_PORT": "29500",
    "GLOO_SOCKET_IFNAME": INTERFACE,
    "OMP_NUM_THREADS": "1",
    # glibc returns every freed array above 128 KiB to the system and pays for its pages again at the next operation.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'examples'}",
}


class Ranks:
    """Running processes of `train.py`. Made by `start`.

    Args:
        processes: in the order of their ranks.
        logs: their files of stderr.
    """

    def __init__(self, processes: list[subprocess.Popen[str]], logs: list[Path]) -> None:
        self._processes, self._logs = processes, logs

    def ask(self, do: str, **arguments: Any) -> list[Any]:
        """Have every rank carry out a command.

        Returns:
            The answer of each.

        Raises:
            RuntimeError: with the end of its log, if a rank stopped instead.
        """
        line = json.dumps({"do": do, **arguments}) + "\n"
        for process in self._processes:
            assert process.stdin is not None
            # A process that has ended is found below, where its log is shown.
            with suppress(BrokenPipeError):
                process.stdin.write(line)
                process.stdin.flush()
        return [self._read(rank, do) for rank in range(len(self._processes))]

    def _read(self, rank: int, do: str) -> Any:
        stdout = self._processes[rank].stdout
        assert stdout is not None
        line = stdout.readline()
        if not line:
            raise RuntimeError(f"Rank {rank} ended during `{do}`:\n{self._logs[rank].read_text()[-3000:]}")
        return json.loads(line)


@contextmanager
def start(network: Network, logs: Path, *options: str) -> Iterator[Ranks]:
    """Start a rank in every namespace for the length of a with block.

    Args:
        network: where.
        logs: folder for what the ranks write to stderr.
        options: for `train.py`.
    """
    logs.mkdir(parents=True, exist_ok=True)
    world = {"MASTER_ADDR": network.addresses[0], "WORLD_SIZE": str(len(network.addresses))}
    processes: list[subprocess.Popen[str]] = []
    files = [logs / f"rank{rank}.log" for rank in range(len(network.addresses))]
    try:
        for rank, file in enumerate(files):
            with file.open("w") as stderr:
                processes.append(
                    subprocess.Popen(
                        [*network.command(rank), sys.executable, "-m", f"{__package__}.train", *options],
                        env=os.environ | ENVIRONMENT | world | {"RANK": str(rank)},
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=stderr,
                        text=True,
                        start_new_session=True,  # Ctrl-C is for this process; it ends them below
                    )
                )
        yield Ranks(processes, files)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.communicate()
