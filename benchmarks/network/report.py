"""Tables, conclusions and a plot of what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display needed
from matplotlib import pyplot
from rich import box
from rich.console import Console
from rich.table import Table

from . import METHODS
from .topology import UNSHAPED

ONE_BIT = "onebit"
TOLERANCE = 0.25
"""How far a prediction may be off."""

COLOURS = {"fp32": "#8a8a8a", "fp16": "#4878a8", "powersgd": "#6a9f58", ONE_BIT: "#d1603d"}


def speedup(row: dict[str, Any], method: str, over: str = ONE_BIT) -> float:
    """Times that `over` is faster than a method at one rate."""
    return row["methods"][method]["seconds"] / row["methods"][over]["seconds"]


def tables(results: dict[str, Any], console: Console) -> None:
    """Print a table for each rate."""
    settings = results["settings"]
    console.print(
        f"\n{results['parameters']:,} parameters, {settings['ranks']} ranks of one thread on {results['cores']} cores, "
        f"backend {settings['backend']}. Step: median of {settings['rounds'] * settings['round_steps']}; spread: "
        "between the quartiles. MB: sent per rank and step, counted at the interface. Loss: held out, nats per byte, "
        f"after {settings['steps']} steps, {settings['warmup']} of them warmup.\n"
    )
    for rate, row in results["rates"].items():
        carried, compute = f"{row['goodput'] / 1e6:,.0f} Mbit/s", f"{1e3 * row['compute']:,.0f} ms"
        title = f"{rate}: links carry {carried}; forward and backward take {compute}"
        table = Table(title=title, title_justify="left", box=box.SIMPLE, collapse_padding=True, pad_edge=False)
        table.add_column("", no_wrap=True)
        for name in ("step ms", "spread", "MB", "1-bit is", "predicted", "off by", "loss"):
            table.add_column(name, justify="right", no_wrap=True)
        for method, found in row["methods"].items():
            predicted = row.get("predicted", {}).get(method)
            table.add_row(
                METHODS[method],
                f"{1e3 * found['seconds']:,.0f}",
                f"{(found['quartiles'][1] - found['quartiles'][0]) / found['seconds']:.0%}",
                f"{found['bytes'] / 1e6:.2f}",
                "" if method == ONE_BIT else f"{speedup(row, method):.2f}x",
                f"{1e3 * predicted:,.0f}" if predicted else "",
                f"{predicted / found['seconds'] - 1:+.0%}" if predicted else "",
                f"{results['held_out_loss'][method]:.4f}",
            )
        console.print(table)


def conclusions(results: dict[str, Any]) -> list[str]:
    """What the numbers say, the unwelcome included."""
    lines = []
    for rate, row in results["rates"].items():
        fastest = min(row["methods"], key=lambda method: row["methods"][method]["seconds"])
        lines.append(f"{rate}: fastest is {METHODS[fastest]}.")
        for method in row["methods"]:
            ratio = speedup(row, method)
            if ratio < 1:
                lines.append(f"{rate}: {METHODS[method]} beats {METHODS[ONE_BIT]}, by {1 / ratio:.2f}x.")
            if ratio < 1 and method in ("fp32", "fp16"):
                lines.append(f"{rate}: compression does not pay against {METHODS[method]}.")
        for method, predicted in row.get("predicted", {}).items():
            off = predicted / row["methods"][method]["seconds"] - 1
            if abs(off) > TOLERANCE:
                lines.append(
                    f"{rate}: the prediction for {METHODS[method]} is off by {off:+.0%}, more than {TOLERANCE:.0%}."
                )
        if row["dropped"]:
            lines.append(f"{rate}: shapers dropped {row['dropped']} packets, which were sent again and counted again.")
    lines += [overlap(results, rate) for rate in results["rates"] if rate != UNSHAPED]
    for rival, bandwidth in results["pays_below"].items():
        where = "at any bandwidth" if bandwidth is None else f"below {bandwidth / 1e6:,.0f} Mbit/s"
        lines.append(f"Predicted from the unshaped times: compression pays against DDP {rival} {where}.")
    loss = results["held_out_loss"]
    ranking = ", ".join(f"{METHODS[method]} {loss[method]:.4f}" for method in sorted(loss, key=loss.__getitem__))
    lines.append(f"Held-out loss, best first: {ranking}. One seed: differences of a few percent may be chance.")
    return lines


def overlap(results: dict[str, Any], rate: str) -> str:
    """How much of a compressed step's exchange hides behind its passes: what they take one by one, and together."""
    row, unshaped = results["rates"][rate], results["rates"][UNSHAPED]
    passes = unshaped["methods"][ONE_BIT]["seconds"] - unshaped["compute"]
    exchange = 8 * row["methods"][ONE_BIT]["bytes"] / row["goodput"]
    together = row["methods"][ONE_BIT]["seconds"] - row["compute"]
    return (
        f"{rate}: besides forward and backward a compressed step took {1e3 * together:,.0f} ms; its passes "
        f"({1e3 * passes:,.0f} ms unshaped) and its exchanges ({1e3 * exchange:,.0f} ms of the link) are "
        f"{1e3 * (passes + exchange):,.0f} ms one after the other."
    )


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw step times by rate, and held-out loss against bytes."""
    figure, (time_axes, loss_axes) = pyplot.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    rates, methods = results["rates"], list(results["held_out_loss"])
    width = 0.8 / len(methods)
    for number, method in enumerate(methods):
        seconds = [1e3 * row["methods"][method]["seconds"] for row in rates.values()]
        places = [place + (number - (len(methods) - 1) / 2) * width for place in range(len(rates))]
        bars = time_axes.bar(places, seconds, width, color=COLOURS[method], label=METHODS[method])
        time_axes.bar_label(bars, [f"{value:,.0f}" for value in seconds], fontsize=7, padding=1)
        sent = next(iter(rates.values()))["methods"][method]["bytes"] / 1e6
        loss_axes.scatter(sent, results["held_out_loss"][method], color=COLOURS[method], s=60, zorder=3)
        loss_axes.annotate(
            METHODS[method], (sent, results["held_out_loss"][method]), xytext=(0, 7), textcoords="offset points",
            ha="center", fontsize=8,
        )  # fmt: skip
    time_axes.set(yscale="log", ylabel="ms per step", title="Step time (forward, backward, exchange, update)")
    time_axes.set_xticks(range(len(rates)), ["unshaped" if rate == "none" else rate for rate in rates])
    shown = [found["seconds"] for row in rates.values() for found in row["methods"].values()]
    time_axes.set_ylim(300 * min(shown), 3000 * max(shown))
    time_axes.legend(frameon=False, fontsize=8)
    steps = results["settings"]["steps"]
    loss_axes.set(xscale="log", xlabel="MB sent per rank and step", ylabel="held-out loss (nats per byte)")
    loss_axes.set_title(f"Quality after {steps} steps, against traffic")
    loss_axes.margins(0.25)
    for axes in (time_axes, loss_axes):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
