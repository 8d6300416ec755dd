"""torchrun starts again what died, on as many ranks or on fewer, from the last checkpoint."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ..recipes import EXAMPLES, Launcher

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SCRIPT = Path(__file__).with_name("restarted_lm.py")
SMALL = ["--device=cpu", "--steps=8", "--freeze-step=3", "--layers=1", "--width=32", "--batch-size=2"]
SMALL += ["--eval-sequences=8", "--save-every=2"]
IN_COMPRESSION = 5


@pytest.fixture
def torchrun(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts torchrun; its workers write what they found to folder/result.json. Whatever still runs is ended."""
    started = []

    def start(*options: str, folder: Path, **environment: str) -> subprocess.Popen[bytes]:
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--local-addr=127.0.0.1", *options]
        command += [str(SCRIPT), str(IN_COMPRESSION), str(folder / "struck"), *SMALL]
        command += [f"--out={folder / 'result.json'}", f"--checkpoint={folder / 'checkpoints'}"]
        with (folder / f"output{len(started)}").open("wb") as output:
            started.append(subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=output))
        return started[-1]

    yield start
    for process in started:
        process.terminate()  # ends its workers too
    for process in started:
        process.wait(60)


def result(process: subprocess.Popen[bytes], folder: Path) -> dict[str, Any]:
    """What a training that ended well wrote."""
    status = process.wait(250)
    assert status == 0, "".join(file.read_text()[-3000:] for file in folder.glob("output*"))
    return json.loads((folder / "result.json").read_text())


def test_a_killed_worker_is_restarted_and_nothing_is_lost(torchrun: Any, launch: Launcher, tmp_path: Path) -> None:
    """The end is that of a run that nobody disturbed, bit for bit: both saved at the same steps."""
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.2"]
    killed = torchrun(*options, folder=tmp_path / "killed")
    expected = launch(EXAMPLES / "train_lm.py", *SMALL, f"--checkpoint={tmp_path / 'calm'}")
    found = result(killed, tmp_path / "killed")
    assert (tmp_path / "killed" / "struck").exists()
    assert found["history"]["stage"] == ["compression"] * 4, "it went on from step 4"
    assert len(expected["history"]["loss"]) == 8
    assert found["history"]["loss"] == expected["history"]["loss"][4:]
    assert found["held_out_loss"] == expected["held_out_loss"]


def test_a_node_that_dies_leaves_a_smaller_training(torchrun: Any, tmp_path: Path) -> None:
    """Two agents on one machine, one worker each; one agent is killed with its worker, the other goes on alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=test"]
    options += [f"--rdzv-endpoint=127.0.0.1:{port}", "--monitor-interval=0.2"]
    options += ["--rdzv-conf=last_call_timeout=15,keep_alive_interval=1,keep_alive_max_attempt=3,is_host=%d"]

    def agent(host: int) -> subprocess.Popen[bytes]:
        *most, conf = options
        return torchrun(*most, conf % host, folder=tmp_path / "run", FAULT="--whole-node")

    first = agent(1)
    second = agent(0)
    found = result(first, tmp_path / "run")
    assert second.wait(60) == -signal.SIGKILL
    assert found["processes"] == 1
    assert found["history"]["stage"] == ["compression"] * 4, "it went on from step 4"
