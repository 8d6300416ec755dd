"""Draw a run's log on one page: has it switched, is the error growing, which layers are clipped, what did it save?

    python -m onebit_triton.report run.jsonl

Reads what `onebit_triton.loggers.JsonLines` wrote and writes a PNG next to it. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

NEEDED: dict[str, type | tuple[type, ...]] = {
    "call": int, "step": int, "skipped_steps": int, "stage": str, "steps_to_switch": int, "ranks": int,
    "elements": int, "bytes_sent": dict, "bytes_saved": dict, "bytes_sent_last_step": int,
    "bytes_saved_last_step": int, "error_ratio": (int, float), "layers": list, "clipped_by": list,
    "layer_error_ratio": list, "variance_stability": list,
}  # fmt: skip
"""Keys that the page is drawn from, and their types."""

BOUNDS = {
    "max_coeff": ("#8c6bb1", "trust ratio held at max_coeff (warmup)"),
    "min_coeff": ("#c9b8dd", "trust ratio held at min_coeff (warmup)"),
    "max_rate_ratio": ("#4d4d4d", "rate held at max_rate_ratio"),
    "factor_max": ("#b2182b", "factor held at factor_max"),
    "threshold_high": ("#ef8a62", "factor held back from rising (factor_threshold)"),
    "threshold_low": ("#67a9cf", "factor held back from falling (factor_threshold)"),
    "factor_min": ("#2166ac", "factor held at factor_min"),
}
"""Bound -> colour and words."""

WARMUP, COMPRESSION, INK = "#8a8a8a", "#d1603d", "#333333"
SHOWN_LAYERS = 12
SETTLED = 0.96
"""variance_stability from which on 1-bit Adam's authors freeze v; above 1 its inverse."""

GROWING = 1.1
"""The error grows if its median over the last quarter of compression is so many times that of the quarter before."""


class LogError(ValueError):
    """A file that is no log of a run; the message names file, line and rule."""


def read_log(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Lines of a log, oldest first; where a resumed run took steps again, the newer ones.

    A last line that was cut short is left out, with a warning.

    Raises:
        LogError: for an empty file, or a line that `JsonLines` did not write.
        OSError: if the file cannot be read.
    """
    path = Path(path)
    texts = path.read_text(encoding="utf-8", errors="replace").split("\n")
    cut = texts.pop() if texts[-1] else texts.pop() or None
    rows: list[dict[str, Any]] = []
    for number, text in enumerate(texts, 1):
        row = _parse(path, number, text)
        while rows and rows[-1]["call"] >= row["call"]:
            rows.pop()
        rows.append(row)
    if cut:
        if not rows:
            raise LogError(f"{path}, line 1: must end in a line break, as JsonLines writes it; no whole line is left.")
        warnings.warn(f"{path}, line {len(texts) + 1}: cut short, left out.", stacklevel=2)
    if not rows:
        raise LogError(f"{path}, line 1: must be a line of JSON, but the file is empty.")
    return rows


def _parse(path: Path, number: int, text: str) -> dict[str, Any]:
    where = f"{path}, line {number}"
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise LogError(f"{where}: must be a JSON object, as JsonLines writes it, but {error.msg}.") from None
    if not isinstance(row, dict):
        raise LogError(f"{where}: must be a JSON object, as JsonLines writes it, got {text[:40]!r}.")
    for key, kind in NEEDED.items():
        if not isinstance(row.get(key), kind):
            raise LogError(f"{where}: must have {key!r} as metrics() gives it, got {row.get(key)!r}.")
    for key in ("clipped_by", "layer_error_ratio", "variance_stability"):
        if len(row[key]) != len(row["layers"]):
            raise LogError(f"{where}: {key!r} must have one entry for each of {len(row['layers'])} layers.")
    return row


# The answers: a headline, and what is behind it


def switched(rows: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Whether the run has switched to compression, and whether its variance had settled by then."""
    last, switches = rows[-1], _switches(rows)
    skipped = f", {last['skipped_steps']} steps skipped" if last["skipped_steps"] else ""
    if last["stage"] == "warmup":
        return "Not switched yet", f"{last['steps_to_switch']} steps of warmup to go{skipped}"
    if not switches:
        return f"Switched to compression before step {rows[0]['step']}", f"{last['step']} steps so far{skipped}"
    known = [value for row in rows if row["step"] == switches[-1] for value in _known(row)]
    settled = "the warmup was too short to tell whether v had settled"
    if known:
        middle = statistics.median(known)
        verdict = "had" if SETTLED <= middle <= 1 / SETTLED else "had not"
        settled = f"v {verdict} settled then: variance_stability {middle:.2f} in the median layer"
    return f"Switched to compression at step {switches[-1]} of {last['step']}{skipped}", settled


def _known(row: dict[str, Any]) -> list[float]:
    return [value for value in row["variance_stability"] if value is not None]


def error_trend(rows: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Whether the error grows, of the whole model or of some layers."""
    rows = [row for row in rows if row["error_ratio"] > 0]
    if not rows:
        return "No error", "nothing was compressed"
    quarter = len(rows) // 4
    if quarter < 2:
        headline = "Too few compressed steps to tell whether the error grows"
        return headline, f"{rows[-1]['error_ratio']:.2f} of the momentum at the end"
    before, now = _last_quarters([row["error_ratio"] for row in rows])
    by_layer = zip(*(_floats(row["layer_error_ratio"]) for row in rows), strict=True)
    names = [
        short(name)
        for name, (early, late) in zip(rows[-1]["layers"], map(_last_quarters, by_layer), strict=True)
        if late > GROWING * early
    ]
    headline = "The error is not growing"
    if now > GROWING * before:
        headline = "The error is growing"
    elif names:
        headline += f", but that of {names[0] if len(names) == 1 else f'{len(names)} layers'} is"
    return headline, f"{before:.2f} of the momentum in the third quarter of compression, {now:.2f} in the last"


def _last_quarters(values: Sequence[float]) -> tuple[float, float]:
    """Medians of the third and of the last quarter."""
    quarter = len(values) // 4
    return statistics.median(values[-2 * quarter : -quarter]), statistics.median(values[-quarter:])


def saving(rows: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """What compression saved."""
    last = rows[-1]
    if last["ranks"] == 1:
        return "Nothing to save", "one rank sends nothing"
    sent, saved = sum(last["bytes_sent"].values()), sum(last["bytes_saved"].values())
    if saved <= 0:
        return "Nothing saved yet", f"{megabytes(sent)} sent by rank 0"
    whole_step = last["bytes_sent_last_step"] + last["bytes_saved_last_step"]
    headline = f"Sent {megabytes(sent)} instead of {megabytes(sent + saved)}: {(sent + saved) / sent:.1f} times less"
    return headline, f"{whole_step / last['bytes_sent_last_step']:.1f} times less in the last step"


def clipping(rows: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Which layers are clipped."""
    names, worst = rows[-1]["layers"], most_clipped(rows)[:1]
    if not worst:
        return "No layer was ever clipped", f"of {len(names)}"
    clipped = sum(bound is not None for bound in rows[-1]["clipped_by"])
    ((layer, share),) = worst
    return (
        f"{clipped} of {len(names)} layers clipped at the end",
        f"most often {short(names[layer])}, {share:.0%} of the time",
    )


def most_clipped(rows: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """(layer, share of the lines in which it was clipped), most clipped first, without those that never were."""
    by_layer = zip(*(row["clipped_by"] for row in rows), strict=True)
    shares = [sum(bound is not None for bound in bounds) / len(rows) for bounds in by_layer]
    return sorted(((layer, share) for layer, share in enumerate(shares) if share > 0), key=lambda pair: -pair[1])


def megabytes(size: float) -> str:
    """Bytes in the unit that suits them."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= 100 * scale or (unit == "MB" and size >= scale):
            return f"{size / scale:,.0f} {unit}"
    return f"{size / 1e3:,.1f} kB"


def short(layer: str) -> str:
    """A layer's name without what all names share."""
    return layer.removeprefix("parameter ").removesuffix(".weight")


# The page


def draw(rows: Sequence[dict[str, Any]], title: str) -> Any:
    """The page as a matplotlib figure.

    Raises:
        ImportError: if matplotlib is not installed, saying how to get it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("The report needs matplotlib: pip install 'onebit-triton[report]'.") from error
    figure = Figure(figsize=(12, 8.5), layout="constrained", dpi=130)
    last = rows[-1]
    figure.suptitle(
        f"{title}: {last['elements'] / 1e6:,.2f} M parameters in {len(last['layers'])} tensors, "
        f"{last['ranks']} rank{'s' if last['ranks'] > 1 else ''}",
        color=INK, fontsize=11,
    )  # fmt: skip
    panels = figure.subplots(2, 2, sharex=True)
    for axes, fill, answer in zip(
        panels.flat, (_progress, _error, _bytes, _clipped), (switched, error_trend, saving, clipping), strict=True
    ):
        fill(axes, rows)
        headline, detail = answer(rows)
        axes.set_title(f"{headline}\n", loc="left", fontsize=11, fontweight="bold", color=INK)
        axes.text(0, 1.025, detail, transform=axes.transAxes, fontsize=9.5, color=INK)
        axes.spines[["top", "right"]].set_visible(False)
        for step in _switches(rows):
            axes.axvline(step, color=INK, linestyle=":", linewidth=1)
    for axes in panels[1]:
        axes.set_xlabel("step")
    panels[0][0].set_xlim(rows[0]["step"], max(last["step"], rows[0]["step"] + 1))
    return figure


def _switches(rows: Sequence[dict[str, Any]]) -> list[int]:
    """Steps at which the stage changed."""
    return [now["step"] for before, now in pairwise(rows) if before["stage"] != now["stage"]]


def _runs(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Stretches of one stage of the last step, each with the first line of the next so that lines join."""
    runs: list[tuple[str, list[dict[str, Any]]]] = []
    for row in rows:
        stage = row.get("last_stage") or row["stage"]
        if not runs or runs[-1][0] != stage:
            if runs:
                runs[-1][1].append(row)
            runs.append((stage, []))
        runs[-1][1].append(row)
    return runs


def _progress(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Loss by stage, if it was logged; otherwise whether the variance has settled."""
    if any(isinstance(row.get("loss"), (int, float)) for row in rows):
        for stage, run in _runs(rows):
            colour = WARMUP if stage == "warmup" else COMPRESSION
            values = [row.get("loss") for row in run]
            axes.plot([row["step"] for row in run], _floats(values), color=colour, linewidth=1.3, label=stage)
        axes.set_ylabel("loss, rank 0")
    else:
        steps, middles = [], []
        for row in rows:
            known = _known(row)
            if known:
                steps.append(row["step"])
                middles.append(statistics.median(known))
        axes.plot(steps, middles, color=INK, linewidth=1.3, label="median layer")
        axes.axhline(1, color=INK, linewidth=0.6)
        axes.set_ylabel("variance_stability (1: settled)")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    if once:
        axes.legend(once.values(), once.keys(), frameon=False, loc="upper right")


def _floats(values: Sequence[Any]) -> list[float]:
    return [float("nan") if value is None else float(value) for value in values]


def _error(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Error over momentum: all layers together, the range of the layers, and the worst of them by name."""
    rows = [row for row in rows if row["error_ratio"] > 0]
    axes.set_ylabel("norm of the error / norm of the momentum")
    if not rows:
        return
    steps = [row["step"] for row in rows]
    of_layers = [sorted(_floats(row["layer_error_ratio"])) for row in rows]
    worst = max(range(len(rows[-1]["layers"])), key=lambda layer: _floats(rows[-1]["layer_error_ratio"])[layer])
    low, high = ([values[round(share * (len(values) - 1))] for values in of_layers] for share in (0.1, 0.9))
    axes.fill_between(steps, low, high, color=COMPRESSION, alpha=0.2, linewidth=0, label="layers, 10 % to 90 %")
    axes.plot(
        steps, [row["layer_error_ratio"][worst] for row in rows], color=WARMUP, linewidth=1,
        label=f"largest at the end: {short(rows[-1]['layers'][worst])}",
    )  # fmt: skip
    axes.plot(steps, [row["error_ratio"] for row in rows], color=COMPRESSION, linewidth=1.6, label="whole model")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="best")


def _bytes(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Bytes sent so far, and what whole gradients would have sent."""
    steps = [row["step"] for row in rows]
    sent = [sum(row["bytes_sent"].values()) / 1e6 for row in rows]
    whole = [sum(row["bytes_saved"].values()) / 1e6 + mb for row, mb in zip(rows, sent, strict=True)]
    axes.plot(steps, whole, color=WARMUP, linestyle="--", linewidth=1.3, label="whole gradients would have sent")
    axes.plot(steps, sent, color=COMPRESSION, linewidth=1.8, label="sent")
    axes.fill_between(steps, sent, whole, color=WARMUP, alpha=0.15, linewidth=0)
    axes.set_ylabel("MB sent by rank 0 so far")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, loc="upper left")


def _clipped(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """For the layers that were clipped most, when, and by which bound."""
    shown = most_clipped(rows)[:SHOWN_LAYERS]
    axes.set_yticks(range(len(shown)), [short(rows[-1]["layers"][layer]) for layer, _ in shown], fontsize=8.5)
    axes.set_ylim(max(len(shown), 4) - 0.5, -0.6)
    edges = [row["step"] for row in rows] + [rows[-1]["step"] + 1]
    seen = []
    for line, (layer, _) in enumerate(shown):
        for bound, (colour, _) in BOUNDS.items():
            spans = [
                (edges[i], edges[i + 1] - edges[i]) for i, row in enumerate(rows) if row["clipped_by"][layer] == bound
            ]
            if spans:
                axes.broken_barh(spans, (line - 0.36, 0.72), color=colour, linewidth=0)
                seen.append(bound)
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=words) for bound, (colour, words) in BOUNDS.items() if bound in seen]
    if handles:
        axes.legend(handles=handles, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.13), fontsize=8.5, ncols=2)


def main(arguments: list[str] | None = None) -> None:
    """Read the command line, draw, and say where the page is."""
    parser = argparse.ArgumentParser(
        prog="python -m onebit_triton.report",
        description="Draw a run's log on one page: has it switched, does the error grow, what is clipped, what saved?",
    )
    parser.add_argument("log", type=Path, help="file that onebit_triton.loggers.JsonLines wrote")
    parser.add_argument("--output", type=Path, help="PNG to write (default: next to the log)")
    options = parser.parse_args(arguments)
    output: Path = options.output or options.log.with_suffix(".png")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rows = read_log(options.log)
        for warning in caught:
            sys.stderr.write(f"warning: {warning.message}\n")
        draw(rows, options.log.name).savefig(output)
    except (LogError, ImportError, OSError) as error:
        parser.error(str(error))
    for answer in (switched, error_trend, saving, clipping):
        sys.stdout.write("; ".join(answer(rows)) + "\n")
    sys.stdout.write(f"{output}\n")


if __name__ == "__main__":
    main()
