"""The examples run as a user runs them, and the demo's model suits the block size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from onebit_triton.buckets import plan_layout

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
