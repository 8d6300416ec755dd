"""The examples run as a user runs them, and the demo's model suits the block size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from onebit_triton.buckets import plan_layout
from onebit_triton.report import read_log

from .recipes import EXAMPLES, Launcher


def test_padding_of_the_demo_model_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from model import ByteTransformer, ModelConfig

    params = list(ByteTransformer(ModelConfig()).parameters())
    layout = plan_layout(params, 1024, 4 * 1024 * 1024, 4)
    assert layout.elements >= 1_000_000
    assert layout.padded_elements <= 1.05 * layout.elements


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "plain"])
def test_train_lm_switches_and_sends_less(tmp_path: Path, launch: Launcher, mode: str) -> None:
    options = ["--device=cpu", "--eval-sequences=8", "--batch-size=2", "--steps=6", "--freeze-step=3"]
    if mode == "ddp":  # as a user starts it
        out = tmp_path / "run.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
        command += ["--local-addr=127.0.0.1", str(EXAMPLES / "train_lm.py"), f"--out={out}", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(out.read_text())
    else:
        found = launch(EXAMPLES / "train_lm.py", "--plain", *options)
    assert found["history"]["stage"] == ["warmup"] * 3 + ["compression"] * 3
    sent = found["optimizer"]["bytes_sent"]
    assert 25 < sent["warmup"] / sent["compression"] < 33
    assert all(torch.tensor(found["history"]["loss"]).isfinite())


@pytest.mark.distributed
@pytest.mark.slow
def test_freeze_steps_are_tabulated_and_not_trained_twice(tmp_path: Path, launch: Launcher) -> None:
    script = EXAMPLES / "freeze_step.py"
    options = ["--steps=4", "--width=32", "--eval-sequences=8", "--freeze-steps", "2", "--beta2", "0.9"]
    printed = launch.trainings_of(script, *options, folder=tmp_path)
    folder = tmp_path / "out" / "freeze-step"
    head, _, frozen, never = printed.splitlines()
    assert printed == (folder / "table.md").read_text()
    assert head == "| freeze_step | share | MB sent per rank | loss at beta2 0.9 |"
    (share, sent, loss), (_, whole, rival) = (row.strip("| ").split(" | ")[1:] for row in (frozen, never))
    assert share == "50%"
    assert 0.4 * float(whole) < float(sent) < 0.7 * float(whole)
    assert 0 < float(loss) < 10
    assert 0 < float(rival) < 10
    trained = sorted(folder.glob("*.json*"))
    assert len(trained) == 4
    written = [file.stat().st_mtime_ns for file in trained]
    assert len(read_log(folder / "seed0-beta2-0.9-freeze-2.jsonl")) == 4
    assert launch.trainings_of(script, *options, folder=tmp_path) == printed
    assert [file.stat().st_mtime_ns for file in trained] == written
