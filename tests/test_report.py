"""The page that is drawn from a log: the answers in its titles, and files that it cannot be drawn from."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from onebit_triton import report
from onebit_triton.loggers import JsonLines
from onebit_triton.report import LogError, clipping, error_trend, read_log, saving, switched

from .training import gradients, parameters, set_gradients, two_groups

PNG = b"\x89PNG\r\n\x1a\n"


def row(step: int, **changes: Any) -> dict[str, Any]:
    """A line of a run of two ranks that switches after 4 steps."""
    compressing = step > 4
    made = {
        "call": step, "step": step, "skipped_steps": 0, "stage": "warmup" if step < 4 else "compression",
        "last_stage": "compression" if compressing else "warmup", "steps_to_switch": max(0, 4 - step), "ranks": 2,
        "elements": 100, "bytes_sent": {"warmup": 400 * min(step, 4), "compression": 20 * max(0, step - 4)},
        "bytes_saved": {"warmup": 0, "compression": 380 * max(0, step - 4)}, "bytes_sent_last_step": 20,
        "bytes_saved_last_step": 380, "error_ratio": 0.8 * compressing, "layers": ["parameter a.weight", "parameter b"],
        "clipped_by": [None, "factor_min" if compressing else None], "layer_error_ratio": [0.7, 0.9],
        "variance_stability": [0.97, 0.99, 1.0][: 2 if step > 2 else 0] or [None, None],
    }  # fmt: skip
    return {**made, **changes}


RUN = [row(step) for step in range(1, 21)]


def test_has_it_switched() -> None:
    assert switched(RUN) == (
        "Switched to compression at step 4 of 20", "v had settled then: variance_stability 0.98 in the median layer",
    )  # fmt: skip
    assert switched(RUN[:3]) == ("Not switched yet", "1 steps of warmup to go")
    assert switched(RUN[6:])[0] == "Switched to compression before step 7"
    late = [row(step, variance_stability=[0.5, 0.7], skipped_steps=2) for step in range(1, 8)]
    headline, detail = switched(late)
    assert headline.endswith("of 7, 2 steps skipped")
    assert detail == "v had not settled then: variance_stability 0.60 in the median layer"
    blind = [row(step, variance_stability=[None, None]) for step in range(1, 8)]
    assert switched(blind)[1] == "the warmup was too short to tell whether v had settled"


def test_is_the_error_growing() -> None:
    assert error_trend(RUN)[0] == "The error is not growing"
    growing = [row(step, error_ratio=0.1 * max(0, step - 4)) for step in range(1, 21)]
    assert error_trend(growing) == (
        "The error is growing", "1.05 of the momentum in the third quarter of compression, 1.45 in the last",
    )  # fmt: skip
    some = [row(step, layer_error_ratio=[0.7, 0.1 * step]) for step in range(1, 21)]
    assert error_trend(some)[0] == "The error is not growing, but that of b is"
    some = [row(step, layer_error_ratio=[step, 0.1 * step]) for step in range(1, 21)]
    assert error_trend(some)[0] == "The error is not growing, but that of 2 layers is"
    assert error_trend(RUN[:3])[0] == "No error"
    assert error_trend(RUN[:6])[0].startswith("Too few")


def test_which_layers_are_clipped() -> None:
    assert clipping(RUN) == ("1 of 2 layers clipped at the end", "most often b, 80% of the time")
    assert clipping(RUN[:3]) == ("No layer was ever clipped", "of 2")


def test_what_did_it_save() -> None:
    assert saving(RUN) == ("Sent 1.9 kB instead of 8.0 kB: 4.2 times less", "20.0 times less in the last step")
    assert saving(RUN[:3])[0] == "Nothing saved yet"
    assert saving([row(9, ranks=1)])[0] == "Nothing to save"


@pytest.mark.parametrize(
    ("size", "shown"), [(950, "0.9 kB"), (1.2e6, "1 MB"), (9.9e10, "99,000 MB"), (3.2e11, "320 GB")]
)
def test_megabytes(size: float, shown: str) -> None:
    assert report.megabytes(size) == shown


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def test_a_resumed_run_replaces_what_it_takes_again(tmp_path: Path) -> None:
    again = [row(step, error_ratio=0.5) for step in range(8, 12)]
    rows = read_log(write(tmp_path / "run.jsonl", RUN[:10] + again))
    assert [one["call"] for one in rows] == list(range(1, 12))
    assert rows[7]["error_ratio"] == 0.5


def test_a_last_line_that_was_cut_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "run.jsonl", RUN)
    path.write_text(path.read_text()[:-40])
    with pytest.warns(UserWarning, match=r"run\.jsonl, line 20: cut short, left out"):
        assert len(read_log(path)) == 19
    report.main([str(path)])
    assert "line 20: cut short" in capsys.readouterr().err
    assert (tmp_path / "run.png").read_bytes().startswith(PNG)


FOREIGN = [
    ("", "line 1: must be a line of JSON, but the file is empty"),
    ("a thesis", "line 1: must end in a line break, as JsonLines writes it"),
    ("a thesis\n", "line 1: must be a JSON object, as JsonLines writes it, but Expecting value"),
    ("[1, 2]\n", r"line 1: must be a JSON object, as JsonLines writes it, got '\[1, 2\]'"),
    (json.dumps(row(1)) + '\n{"loss": 1}\n', "line 2: must have 'call' as metrics.. gives it, got None"),
    (json.dumps(row(1, bytes_sent=7)) + "\n", "line 1: must have 'bytes_sent' as metrics.. gives it, got 7"),
    (json.dumps(row(1, clipped_by=[None])) + "\n", "line 1: 'clipped_by' must have one entry for each of 2 layers"),
    (json.dumps(row(1, layers=[])) + "\n" , "line 1: 'clipped_by' must have one entry for each of 0 layers"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), FOREIGN, ids=range(len(FOREIGN)))
def test_a_foreign_file_is_refused(tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "foreign.txt"
    path.write_text(text)
    with pytest.raises(LogError, match=r"foreign\.txt, " + message):
        read_log(path)
    with pytest.raises(SystemExit) as ended:
        report.main([str(path)])
    assert ended.value.code == 2
    assert f"{path}, line" in capsys.readouterr().err
    assert not path.with_suffix(".png").exists()


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        report.main([str(tmp_path / "nowhere.jsonl")])
    assert "nowhere.jsonl" in capsys.readouterr().err


def test_without_matplotlib_it_says_how_to_get_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "run.jsonl", RUN)
    with mock.patch.dict(sys.modules, {"matplotlib.figure": None}), pytest.raises(SystemExit):
        report.main([str(path)])
    assert "pip install 'onebit-triton[report]'" in capsys.readouterr().err


def titles(rows: list[dict[str, Any]]) -> list[str]:
    figure = report.draw(rows, "run")
    return [axes.get_title(loc="left").strip() for axes in figure.axes]


def test_the_page_answers_the_four_questions() -> None:
    assert titles(RUN) == [answer(RUN)[0] for answer in (switched, error_trend, saving, clipping)]
    figure = report.draw(RUN, "run")
    assert [text.get_text() for text in figure.axes[3].get_yticklabels()] == ["b"]


@pytest.mark.parametrize("rows", [RUN[:1], RUN[:4], [row(9, ranks=1, loss=None)], [row(s, loss=1 / s) for s in (1, 9)]])
def test_a_page_of_little(rows: list[dict[str, Any]]) -> None:
    assert len(titles(rows)) == 4


def test_many_layers_are_not_all_drawn() -> None:
    layers = 300
    rows = [
        row(
            step, layers=[f"parameter layer{i}.weight" for i in range(layers)], clipped_by=["threshold_low"] * layers,
            layer_error_ratio=[0.5] * layers, variance_stability=[1.0] * layers,
        )
        for step in range(1, 9)
    ]  # fmt: skip
    figure = report.draw(rows, "run")
    assert len(figure.axes[3].get_yticklabels()) == report.SHOWN_LAYERS


def test_a_real_run_as_a_user_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = parameters()
    optimizer = two_groups(params, backend="torch", freeze_step=3)
    log = JsonLines(tmp_path / "run.jsonl")
    for step in range(8):
        set_gradients(params, gradients(step, 0, params))
        optimizer.step()
        log(optimizer, loss=1.0 / (step + 1))
    output = tmp_path / "page.png"
    report.main([str(tmp_path / "run.jsonl"), "--output", str(output)])
    assert output.read_bytes().startswith(PNG)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("Switched to compression at step 3 of 8")
    assert said[-1] == str(output)
