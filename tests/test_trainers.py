"""The recipes for trainers train as a plain loop does, send one bit per parameter, and continue from checkpoints."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from .recipes import EXAMPLES, Launcher

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
STEPS, FREEZE_STEP, ACCUMULATE = 13, 6, 2
# The first checkpoint is of the warmup, the second of compression.
SAVED = WARMUP, COMPRESSION = 5, 10
OPTIONS = [f"--steps={STEPS}", f"--freeze-step={FREEZE_STEP}", f"--accumulate={ACCUMULATE}", f"--save-every={WARMUP}"]
PLAIN = Path(__file__).with_name("plain_lm.py")


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


@pytest.fixture(scope="module")
def plain_losses(launch: Launcher, plain_folder: Path) -> list[float]:
    return launch(PLAIN, *OPTIONS, f"--checkpoints={plain_folder}")["losses"]


@pytest.fixture(scope="module")
def plain_losses_of_three(launch: Launcher, plain_folder: Path, plain_losses: list[float]) -> list[float]:
    """Of three ranks that continue what two have saved in compression."""
    options = [*OPTIONS, f"--checkpoints={plain_folder}/three", f"--resume={plain_folder}/{COMPRESSION}.pt"]
    losses = launch(PLAIN, *options, ranks=3)["losses"]
    check_no_jump(losses, plain_losses)
    return losses


def check_run(found: dict[str, Any]) -> None:
    """The loss falls in both stages, and the traffic is that of one exchange per step."""
    losses = found["losses"]
    assert len(losses) == STEPS
    for stage in (losses[:FREEZE_STEP], losses[FREEZE_STEP:]):
        third = len(stage) // 3
        assert sum(stage[-third:]) < sum(stage[:third]), losses
    # Had every backward pass sent gradients, it would be ACCUMULATE times as much.
    assert 25 < found["bytes_sent"]["warmup"] / FREEZE_STEP / found["bytes_sent_last_step"] < 33


def check_no_jump(losses: list[float], before: list[float]) -> None:
    """Other batches are seen at another number of ranks, but the loss goes on from where it was, not where it began."""
    assert len(losses) == STEPS - COMPRESSION
    assert max(losses) < before[COMPRESSION - 1] + 0.1 * (before[0] - before[COMPRESSION - 1]), (losses, before)


def check_resume(launch: Launcher, script: Path, options: list[str], losses: list[float], checkpoint: Path) -> None:
    """Both checkpoints continue as if nothing had happened."""
    for step in SAVED:
        resumed = launch(script, *options, f"--resume={str(checkpoint).format(step)}")
        assert resumed["losses"][step - STEPS :] == losses[step:]


@pytest.mark.parametrize(
    ("script", "checkpoint"),
    [
        ("accelerate_lm.py", "step-{}"),
        ("lightning_fabric_lm.py", "step-{}.ckpt"),
        ("lightning_trainer_lm.py", "step={}.ckpt"),
    ],
)
def test_language_model(
    launch: Launcher, plain_losses: list[float], plain_losses_of_three: list[float], tmp_path: Path, script: str,
    checkpoint: str,
) -> None:  # fmt: skip
    found = launch(EXAMPLES / script, *OPTIONS, f"--checkpoints={tmp_path}")
    check_run(found)
    assert found["losses"] == plain_losses
    # Elsewhere, because Lightning, resumed, saves once more where it began.
    options = [*OPTIONS, f"--checkpoints={tmp_path}/resumed"]
    check_resume(launch, EXAMPLES / script, options, plain_losses, tmp_path / checkpoint)

    file = tmp_path / checkpoint.format(COMPRESSION)
    resumed = launch(EXAMPLES / script, *options, f"--resume={file}", ranks=3)
    assert resumed["losses"][COMPRESSION - STEPS :] == plain_losses_of_three


def test_bert(launch: Launcher, tmp_path: Path) -> None:
    options = [*OPTIONS, "--batch-size=16", f"--checkpoints={tmp_path}", "--eval-windows=64"]
    found = launch(EXAMPLES / "transformers_bert.py", *options)
    check_run(found)
    # A mean over the bytes that are asked for, not a sum over passes or ranks, which would be 2 or 4 times as much.
    assert found["losses"][0] == pytest.approx(math.log(257), abs=1.0)
    check_resume(launch, EXAMPLES / "transformers_bert.py", options, found["losses"], tmp_path / "checkpoint-{}")

    file = tmp_path / f"checkpoint-{COMPRESSION}"
    resumed = launch(EXAMPLES / "transformers_bert.py", *options, f"--resume={file}", ranks=1)
    check_no_jump(resumed["losses"][COMPRESSION - STEPS :], found["losses"])


def test_restarts_on_other_ranks_keep_the_errors(launch: Launcher) -> None:
    options = ["--save-at=8", "--freeze-step=4", "--more=4", "--width=32", "--seeds=1"]
    found = launch(EXAMPLES / "resume.py", *options, ranks=4)["restarts"]
    restarts = {(run["savers"], run["ranks"]): run for run in found}
    assert list(restarts) == [(4, 4), (4, 2), (4, 1), (2, 3)]
    assert restarts[4, 4]["kept"] == restarts[4, 4]["uninterrupted"]
    assert restarts[4, 4]["kept_distance"] == 0.0
    for run in restarts.values():
        # The first step sees the saved parameters, and the same sequences at any number of ranks.
        assert run["kept"][0] == pytest.approx(run["uninterrupted"][0], abs=1e-4)
        assert run["kept_distance"] < 0.5 * run["dropped_distance"]
