"""One line per step: who writes, what, and what is left after a crash."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from onebit_triton import OneBitLamb
from onebit_triton.loggers import JsonLines, TensorBoard

from .ranks import RankPool
from .training import gradients, parameters, set_gradients, two_groups


def steps(count: int, log: Any, first: int = 0, **values: Any) -> OneBitLamb:
    params = parameters()
    optimizer = two_groups(params, backend="torch", freeze_step=2)
    for step in range(first, first + count):
        set_gradients(params, gradients(step, 0, params))
        optimizer.step()
        log(optimizer, **values)
    return optimizer


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_the_metrics_and_what_was_passed(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    loss = torch.tensor([0.123456789], requires_grad=True)
    optimizer = steps(3, JsonLines(path), loss=loss, epoch=1)
    rows = read(path)
    assert [row["call"] for row in rows] == [1, 2, 3]
    assert [row["last_stage"] for row in rows] == ["warmup", "warmup", "compression"]
    found = optimizer.metrics()
    assert set(rows[-1]) == {*found, "call", "time", "loss", "epoch"}
    assert (rows[-1]["loss"], rows[-1]["epoch"]) == (0.123457, 1)
    assert rows[-1]["trust_ratio"] == pytest.approx(found["trust_ratio"], rel=1e-5)
    assert rows[-1]["bytes_sent"] == found["bytes_sent"]
    assert rows[-1]["clipped_by"] == found["clipped_by"]
    assert rows[0]["time"] <= rows[-1]["time"]


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    steps(1, JsonLines(path), loss=torch.tensor(math.nan), other=-math.inf)
    (row,) = read(path)
    assert row["loss"] is row["other"] is None
    assert "NaN" not in path.read_text()


def test_every_so_many_calls(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    steps(5, JsonLines(path, every=2))
    assert [row["call"] for row in read(path)] == [2, 4]
    for every in (0, 1.5):
        with pytest.raises(ValueError, match="Invalid every"):
            JsonLines(path, every=every)  # type: ignore[arg-type]


def test_a_resumed_run_goes_on_behind_the_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    steps(2, JsonLines(path))
    whole = path.read_text()
    path.write_text(whole + '{"call": 3, "ti')
    steps(1, JsonLines(path))
    assert path.read_text().startswith(whole)
    assert [row["call"] for row in read(path)] == [1, 2, 1]
    path.write_text('{"ca')
    steps(1, JsonLines(path))
    assert [row["call"] for row in read(path)] == [1]


@pytest.mark.parametrize("text", ["a thesis\n", '{"loss": 1}\n', "a thesis without an end"])
def test_a_foreign_file_is_left_alone(tmp_path: Path, text: str) -> None:
    path = tmp_path / "thesis.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"Invalid path=.*thesis\.txt"):
        steps(1, JsonLines(path))
    assert path.read_text() == text


def test_a_crash_leaves_every_line(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    log = JsonLines(path)
    steps(1, log)
    assert len(read(path)) == 1  # without closing anything


def test_values_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    log = JsonLines(tmp_path / "run.jsonl")
    with pytest.raises(ValueError, match="Invalid name 'stage'"):
        steps(1, log, stage=1.0)
    with pytest.raises(ValueError, match="Invalid name 'time'"):
        steps(1, log, time=1.0)
    with pytest.raises(TypeError, match=r"Invalid loss=tensor\(\[1\., 1\.\]\)"):
        steps(1, log, loss=torch.ones(2))
    with pytest.raises(TypeError, match="Invalid loss='low'"):
        steps(1, log, loss="low")


class Writer:
    """What a SummaryWriter is asked for."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        assert isinstance(value, (int, float))
        assert (tag, step) not in self.seen
        self.seen[tag, step] = value


def test_tensorboard_gets_scalars_by_step_and_layer() -> None:
    writer = Writer()
    found = steps(4, TensorBoard(writer), loss=torch.tensor(0.5)).metrics()
    seen = writer.seen
    assert seen["onebit_lamb/loss", 4] == 0.5
    assert [seen["onebit_lamb/compressing", step] for step in (1, 2, 3, 4)] == [0, 0, 1, 1]
    assert seen["onebit_lamb/bytes_sent/warmup", 4] == found["bytes_sent"]["warmup"]
    assert seen["onebit_lamb/clipped/factor_max", 4] == found["clipped"]["factor_max"]
    for layer, factor in zip(found["layers"], found["factor"], strict=True):
        assert seen[f"onebit_lamb_factor/{layer}", 4] == factor
    assert not any(tag.startswith(("onebit_lamb/layers", "onebit_lamb_layers")) for tag, _ in seen)
    assert not any(tag.startswith("onebit_lamb_clipped_by") for tag, _ in seen)


def test_tensorboard_without_layers() -> None:
    writer = Writer()
    steps(2, TensorBoard(writer, every=2, layers=False))
    assert {step for _, step in writer.seen} == {2}
    assert {tag.split("/")[0] for tag, _ in writer.seen} == {"onebit_lamb"}


def test_a_real_summary_writer(tmp_path: Path) -> None:
    from torch.utils import tensorboard

    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        steps(2, TensorBoard(writer), loss=0.5)
    assert any(file.stat().st_size for file in tmp_path.iterdir())


def log_on_every_rank(rank: int, ranks: int, folder: str) -> None:
    params = parameters()
    optimizer = two_groups(params, backend="torch", freeze_step=1)
    writer = Writer()
    logs = (JsonLines(Path(folder) / f"rank{rank}.jsonl"), TensorBoard(writer if rank == 0 else None))
    for step in range(3):
        set_gradients(params, gradients(step, rank, params))
        optimizer.step()
        for log in logs:
            log(optimizer, loss=float(rank))
    assert bool(writer.seen) == (rank == 0)


@pytest.mark.distributed
def test_rank_0_alone_writes(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, log_on_every_rank, str(tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["rank0.jsonl"]
    rows = read(tmp_path / "rank0.jsonl")
    assert [row["loss"] for row in rows] == [0.0] * 3
    assert rows[-1]["bytes_saved"]["compression"] > 0
