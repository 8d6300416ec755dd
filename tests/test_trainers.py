"""The recipes for trainers train as a plain loop does, send one bit per parameter, and continue from checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from .recipes import EXAMPLES, Launcher

pytestmark = pytest.mark.distributed
# All that the recipes import, the slow parts first.
MODULES = ("transformers.trainer", "transformers.models.bert.modeling_bert", "lightning.pytorch", "onebit_triton")
STEPS, FREEZE_STEP, ACCUMULATE = 14, 6, 2
# The first checkpoint is of the warmup, the second of compression.
SAVED = 5, 10
OPTIONS = [f"--steps={STEPS}", f"--freeze-step={FREEZE_STEP}", f"--accumulate={ACCUMULATE}", f"--save-every={SAVED[0]}"]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    return Launcher(MODULES, tmp_path_factory.mktemp("recipes"))


@pytest.fixture(scope="module")
def plain_losses(launch: Launcher) -> list[float]:
    return launch(Path(__file__).with_name("plain_lm.py"), *OPTIONS)["losses"]


def check_run(found: dict[str, Any]) -> None:
    """The loss falls in both stages, and the traffic is that of one exchange per step."""
    losses = found["losses"]
    assert len(losses) == STEPS
    for stage in (losses[:FREEZE_STEP], losses[FREEZE_STEP:]):
        third = len(stage) // 3
        assert sum(stage[-third:]) < sum(stage[:third]), losses
    sent = found["bytes_sent"]
    # Had every backward pass sent gradients, it would be ACCUMULATE times as much.
    assert 25 < (sent["warmup"] / FREEZE_STEP) / (sent["compression"] / (STEPS - FREEZE_STEP)) < 33


def check_resume(launch: Launcher, script: Path, options: list[str], losses: list[float], checkpoint: Path) -> None:
    """Both checkpoints continue as if nothing had happened."""
    for step in SAVED:
        resumed = launch(script, *options, f"--resume={str(checkpoint).format(step)}")
        assert resumed["losses"][step - STEPS :] == losses[step:]


@pytest.mark.parametrize(
    ("script", "checkpoint"),
    [
        ("accelerate_lm.py", "step-{}"),
        ("lightning_fabric_lm.py", "step-{}"),
        ("lightning_trainer_lm.py", "step={}.ckpt"),
    ],
)
def test_language_model(
    launch: Launcher, plain_losses: list[float], tmp_path: Path, script: str, checkpoint: str
) -> None:
    options = [*OPTIONS, f"--checkpoints={tmp_path}"]
    found = launch(EXAMPLES / script, *options)
    check_run(found)
    assert found["losses"] == plain_losses
    check_resume(launch, EXAMPLES / script, options, plain_losses, tmp_path / checkpoint)


def test_bert(launch: Launcher, tmp_path: Path) -> None:
    options = [*OPTIONS, f"--checkpoints={tmp_path}", "--eval-windows=64"]
    found = launch(EXAMPLES / "transformers_bert.py", *options)
    check_run(found)
    # A mean over the bytes that are asked for, not a sum over passes or ranks, which would be 2 or 4 times as much.
    assert found["losses"][0] == pytest.approx(math.log(257), abs=1.0)
    check_resume(launch, EXAMPLES / "transformers_bert.py", options, found["losses"], tmp_path / "checkpoint-{}")
