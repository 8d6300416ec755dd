"""Runs scripts on several ranks, in processes that need not import what takes long to import."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

EXAMPLES = Path(__file__).parents[1] / "examples"
MODULES = ("transformers.trainer", "transformers.models.bert.modeling_bert", "lightning.pytorch", "onebit_triton")
"""All that the examples import, the slow parts first."""
TIMEOUT = 200.0
"""Seconds that one run may take before its processes are killed."""


def _begin(function: Callable[..., object], arguments: tuple[Any, ...], output: Path, folder: Path) -> None:
    """Run a function in this new process, in a folder; what it prints goes into a file."""
    import torch

    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.chdir(folder)
    torch.set_num_threads(1)
    function(*arguments)


def _rank(rank: int, ranks: int, port: int, script: Path, arguments: list[str]) -> None:
    """Become what torchrun would have started."""
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "GROUP_RANK": 0}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "none"}
    # What torchrun sets too. It also keeps Accelerate from choosing another number of threads.
    environment |= {"OMP_NUM_THREADS": 1}
    os.environ.update({name: str(value) for name, value in environment.items()})
    sys.path.insert(0, str(EXAMPLES))
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


class Launcher:
    """Forks processes off one that has imported some modules and has done nothing else.

    Args:
        modules: what it imports, once.
        folder: for the output of the processes.
    """

    def __init__(self, modules: Iterable[str], folder: Path) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(modules))
        self._folder = folder

    def fork(self, function: Callable[..., object], calls: Sequence[tuple[Any, ...]], folder: Path) -> None:
        """Call a function with each of these arguments, side by side, each in a process of its own, in a folder.

        Raises:
            AssertionError: if one fails, with the end of its output.
        """
        outputs = [self._folder / f"output{number}.txt" for number in range(len(calls))]
        processes = [
            self._context.Process(target=_begin, args=(function, arguments, output, folder), daemon=True)
            for arguments, output in zip(calls, outputs, strict=True)
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
        for number, (process, output) in enumerate(zip(processes, outputs, strict=True)):
            assert process.exitcode == 0, f"process {number}, status {process.exitcode}:\n{output.read_text()[-3000:]}"

    def __call__(self, script: Path, *arguments: str, ranks: int = 2, folder: Path | None = None) -> dict[str, Any]:
        """Run a script that takes `--out FILE` on several ranks, in a folder; what it wrote there.

        Raises:
            AssertionError: if a rank fails, with the end of its output.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        result = self._folder / "result.json"
        result.unlink(missing_ok=True)
        options = [*arguments, f"--out={result}"]
        calls = [(rank, ranks, port, script, options) for rank in range(ranks)]
        self.fork(_rank, calls, folder or self._folder)
        return json.loads(result.read_text())

    def trainings_of(self, script: Path, *arguments: str, folder: Path) -> str:
        """Run an example that starts `train_lm.py` by `launch.run_training`, in a folder, without torchrun.

        The example itself runs in this process. Returns what it printed.
        """

        def run_training(processes: int, label: str, result: Path, options: list[str]) -> dict[str, Any]:
            found = self(EXAMPLES / "train_lm.py", f"--label={label}", *options, ranks=processes, folder=folder)
            result.write_text(json.dumps(found))
            return found

        before, printed = Path.cwd(), io.StringIO()
        with (
            mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
            mock.patch.object(sys, "argv", [str(script), *arguments]),
            mock.patch.object(importlib.import_module("launch"), "run_training", run_training),
            contextlib.redirect_stdout(printed),
        ):
            os.chdir(folder)
            try:
                runpy.run_path(str(script), run_name="__main__")
            finally:
                os.chdir(before)
        return printed.getvalue()
