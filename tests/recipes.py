"""Runs scripts on several ranks, in processes that need not import what takes long to import."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples"
MODULES = ("transformers.trainer", "transformers.models.bert.modeling_bert", "lightning.pytorch", "onebit_triton")
"""All that the recipes import, the slow parts first."""
TIMEOUT = 200.0
"""Seconds that one run may take before its processes are killed."""


def _run(
    rank: int, ranks: int, port: int, script: Path, arguments: list[str], output: Path, folder: Path
) -> None:  # fmt: skip
    """Become what torchrun would have started."""
    import torch

    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    # What torchrun sets too. It also keeps Accelerate from choosing another number of threads.
    environment |= {"OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in environment.items()})
    torch.set_num_threads(1)
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


class Launcher:
    """Forks the ranks of a script off a process that has imported some modules and has done nothing else.

    Args:
        modules: what it imports, once.
        folder: for the output of the ranks.
    """

    def __init__(self, modules: Iterable[str], folder: Path) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(modules))
        self._folder = folder

    def __call__(self, script: Path, *arguments: str, ranks: int = 2, folder: Path | None = None) -> dict[str, Any]:
        """Run a script that takes `--out FILE`, in a folder; what it wrote there.

        Raises:
            AssertionError: if a rank fails, with the end of its output.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        result = self._folder / "result.json"
        result.unlink(missing_ok=True)
        outputs = [self._folder / f"{script.stem}.rank{rank}.txt" for rank in range(ranks)]
        processes = [
            self._context.Process(
                target=_run,
                args=(rank, ranks, port, script, [*arguments, f"--out={result}"], output, folder or self._folder),
                daemon=True,
            )
            for rank, output in enumerate(outputs)
        ]
        for process in processes:
            process.start()
        try:
            for process in processes:
                process.join(TIMEOUT)
        finally:
            for process in processes:
                process.kill()
                process.join()
        for process, output in zip(processes, outputs, strict=True):
            assert process.exitcode == 0, f"{output.name}, status {process.exitcode}:\n{output.read_text()[-3000:]}"
        return json.loads(result.read_text())
