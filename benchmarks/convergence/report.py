"""Tables and plots of results."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from onebit_triton.collectives import ring_bytes

from .tasks import TASKS
from .train import RANKS, Run

Result = dict[str, Any]


def score(result: Result) -> float:
    """What counts in the end, lower is better: the held-out loss, or the error rate; infinite if it diverged."""
    if result["diverged"]:
        return math.inf
    last = result["held_out"][-1]
    value = last["loss"] if TASKS[result["run"]["task"]].score == "loss" else 1 - last["accuracy"]
    return value if math.isfinite(value) else math.inf


def variant(result: Result) -> str:
    """What distinguishes trainings in a table: all but their seed."""
    run = Run(**result["run"])
    options = "".join(f", {key.replace('_', ' ')} {value}" for key, value in sorted(run.options.items()))
    ranks = f", {run.ranks} ranks" if run.ranks != RANKS else ""
    return f"{run.method}{options}, lr {run.lr:g}{ranks}"


def by_variant(results: list[Result]) -> dict[str, list[Result]]:
    """Results of each variant, in the order in which they come."""
    found: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        found[variant(result)].append(result)
    return dict(found)


def spread(values: list[float]) -> str:
    """Mean and standard deviation, as far as there are values for them."""
    finite = [value for value in values if math.isfinite(value)]
    text = f"{mean(finite):.4f}" if finite else "-"
    if len(finite) > 1:
        text += f" ± {stdev(finite):.4f}"
    return text + (f" ({len(values) - len(finite)} of {len(values)} diverged)" if len(finite) < len(values) else "")


BAND = 2.0
"""A method is in LAMB's band if its mean is at most so many standard deviations of LAMB's seeds behind LAMB's mean."""


def behind(results: list[Result]) -> dict[str, float]:
    """How far the mean of each variant is behind LAMB's with the same rate, in LAMB's standard deviations over seeds.

    Variants without such a LAMB of several seeds, or with one that diverged, are left out.
    """
    scores = {label: [score(result) for result in own] for label, own in by_variant(results).items()}
    found = {}
    for label, own in by_variant(results).items():
        lamb = scores.get(f"lamb, lr {own[0]['run']['lr']:g}", [])
        if len(lamb) > 1 and all(map(math.isfinite, lamb)) and stdev(lamb) > 0:
            found[label] = (mean(scores[label]) - mean(lamb)) / stdev(lamb)
    return found


def table(results: list[Result]) -> str:
    """A row per variant: score, how far that is behind LAMB, bytes against fp16, and where compression began."""
    first = TASKS[results[0]["run"]["task"]].score
    name = "held-out loss" if first == "loss" else "held-out error rate"
    lines = [
        f"| method | {name} | behind LAMB, in its std | less sent than fp16 | compressed from step | seeds |",
        "|---|---|---|---|---|---|",
    ]
    behinds = behind(results)
    for label, own in by_variant(results).items():
        far = f"{behinds[label]:.1f}" if label in behinds else ""
        switches = sorted({result["switched"] for result in own if result["switched"] is not None})
        shown = " to ".join(str(switches[i]) for i in sorted({0, -1 % len(switches)})) if switches else "never"
        less = mean(_fp16_bytes(result) / result["held_out"][-1]["bytes"] for result in own)
        scores = spread([score(result) for result in own])
        lines.append(f"| {label} | {scores} | {far} | {less:.2f} times | {shown} | {len(own)} |")
    return "\n".join(lines) + "\n"


def _fp16_bytes(result: Result) -> int:
    """What a rank would have sent in as many steps that average gradients in fp16."""
    return result["held_out"][-1]["step"] * ring_bytes(result["parameters"], result["run"]["ranks"], 2)


def plot(results: list[Result], path: Path) -> None:
    """Held-out score by steps and by bytes sent: per variant a line, the mean, and a band from best to worst."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (by_step, by_bytes) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    loss = TASKS[results[0]["run"]["task"]].score == "loss"
    key = "loss" if loss else "accuracy"
    for label, own in by_variant(results).items():
        points = min(len(result["held_out"]) for result in own)
        steps = [own[0]["held_out"][i]["step"] for i in range(1, points)]
        sent = [mean(r["held_out"][i]["bytes"] for r in own) / 1e6 for i in range(1, points)]
        values = [[r["held_out"][i][key] for r in own] for i in range(1, points)]
        for axes, x in ((by_step, steps), (by_bytes, sent)):
            (line,) = axes.plot(x, [mean(v) for v in values], label=label)
            axes.fill_between(x, [min(v) for v in values], [max(v) for v in values], alpha=0.2, color=line.get_color())
    by_step.set_xlabel("step")
    by_bytes.set_xlabel("MB sent by a rank")
    by_bytes.set_xscale("log")
    by_step.set_ylabel("held-out loss (nats)" if loss else "held-out accuracy")
    by_step.legend(fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)
