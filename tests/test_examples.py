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

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_padding_of_the_demo_model_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from model import ByteTransformer, ModelConfig

    params = list(ByteTransformer(ModelConfig()).parameters())
    layout = plan_layout(params, 1024, 4 * 1024 * 1024, 4)
    assert layout.elements >= 1_000_000
    assert layout.padded_elements <= 1.05 * layout.elements


def train(out: Path, *options: str) -> dict:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += ["--local-addr=127.0.0.1", str(EXAMPLES / "train_lm.py"), "--device=cpu", f"--out={out}"]
    command += ["--eval-sequences=8", "--batch-size=2", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.distributed
@pytest.mark.parametrize("mode", [[], ["--plain"]], ids=["ddp", "plain"])
def test_train_lm_switches_and_sends_less(tmp_path: Path, mode: list[str]) -> None:
    found = train(tmp_path / "run.json", "--steps=6", "--freeze-step=3", *mode)
    assert found["history"]["stage"] == ["warmup"] * 3 + ["compression"] * 3
    sent = found["optimizer"]["bytes_sent"]
    assert 25 < sent["warmup"] / sent["compression"] < 33
    assert all(torch.tensor(found["history"]["loss"]).isfinite())


@pytest.mark.distributed
def test_freeze_steps_are_tabulated_and_not_trained_twice(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "freeze_step.py"), f"--out={tmp_path}", "--steps=4", "--width=32"]
    command += ["--eval-sequences=8", "--freeze-steps", "2", "--beta2", "0.9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    head, _, frozen, never = (tmp_path / "table.md").read_text().splitlines()
    assert head == "| freeze_step | share | MB sent per rank | loss at beta2 0.9 |"
    (share, sent, loss), (_, whole, rival) = (row.strip("| ").split(" | ")[1:] for row in (frozen, never))
    assert share == "50%"
    assert 0.4 * float(whole) < float(sent) < 0.7 * float(whole)
    assert 0 < float(loss) < 10
    assert 0 < float(rival) < 10
    assert len(read_log(tmp_path / "seed0-beta2-0.9-freeze-2.jsonl")) == 4
    again = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert "held-out" not in again.stdout
    assert again.stdout == (tmp_path / "table.md").read_text()
