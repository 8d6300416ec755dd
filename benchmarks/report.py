"""Write the README's table and a plot from what the benchmarks measured.

pytest benchmarks/ --benchmark-only --benchmark-json out/benchmarks.json
python benchmarks/report.py out/benchmarks.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"

LABELS = {
    "onebit-triton": "onebit_triton, `triton`",
    "onebit-inductor": "onebit_triton, `inductor`",
    "onebit-torch": "onebit_triton, `torch`",
    "deepspeed-onebitlamb": "DeepSpeed {deepspeed} OnebitLamb",
    "lamb": "pytorch-optimizer {pytorch_optimizer} Lamb",
    "lamb-foreach": "the same, foreach",
    "adamw-foreach": "torch AdamW, foreach",
    "adamw-fused": "torch AdamW, fused",
}
"""Implementations in the order of the table's rows; those that were not measured are left out."""

STAGES = ("warmup", "compression")

Step = dict[str, Any]


def read_steps(found: dict[str, Any]) -> tuple[list[tuple[str, dict[str, Step]]], int, str]:
    """(Label, stage -> benchmark) of every implementation, at the most ranks and the largest size; ranks and size."""
    steps = [bench for bench in found["benchmarks"] if bench["name"].startswith("bench_step[")]
    if not steps:
        raise SystemExit("No benchmark of steps in the file: run bench_step.py too.")
    ranks = max(bench["params"]["ranks"] for bench in steps)
    elements = max(bench["extra_info"]["elements"] for bench in steps)
    rows: dict[str, dict[str, Step]] = {name: {} for name in LABELS}
    for bench in steps:
        if bench["params"]["ranks"] == ranks and bench["extra_info"]["elements"] == elements:
            rows[bench["params"]["implementation"]][bench["params"]["stage"]] = bench
            versions, size = bench["extra_info"]["versions"], bench["params"]["size"]
    return [(LABELS[name].format(**versions), row) for name, row in rows.items() if row], ranks, size


def milliseconds(bench: Step) -> float:
    return bench["stats"]["median"] * 1e3


def both(row: dict[str, Step], text: Any) -> str:
    """What `text` says of a warmup and of a compressed step, as one cell."""
    return " / ".join(text(row[stage]) if stage in row else "–" for stage in STAGES)


def table(found: dict[str, Any]) -> str:
    """The table, in Markdown, and its conditions."""
    rows, ranks, _ = read_steps(found)
    lines = [
        "| warmup / compressed step | ms | bytes moved per parameter | launches | bytes sent per rank |",
        "|---|---|---|---|---|",
    ]
    for label, row in rows:
        cells = [
            both(row, lambda bench: f"{milliseconds(bench):.1f}"),
            both(row, lambda bench: f"{bench['extra_info']['bytes'] / bench['extra_info']['elements']:.0f}"),
            both(row, lambda bench: f"{bench['extra_info']['launches']:,}"),
            both(row, lambda bench: f"{bench['extra_info']['wire_bytes']:,}"),
        ]
        lines.append(" | ".join(["| " + label, *cells]) + " |")
    bench = next(iter(rows[0][1].values()))
    info = bench["extra_info"]
    versions, machine = info["versions"], found["machine_info"]
    where = versions.get("gpu", f"{machine['cpu']}, {machine['cores']} cores")
    lines += [
        "",
        f"Medians of {bench['stats']['rounds']} steps, taken in turns, on {ranks} rank{'s' * (ranks > 1)} with one "
        f"thread each: {info['elements']:,} parameters in 63 tensors, fp32. Warmup without averaging the gradients, "
        f"compression with its exchange (gloo, one machine). {where}, copying {info['copy GB/s']:.1f} GB/s on one "
        f"thread; Python {versions['python']}, torch {versions['torch']}. Compiled passes count as launches by their "
        "calls and by the bytes that they declare, everything else by the operations of torch and their operands.",
    ]
    return "\n".join(lines)


def write_table(readme: Path, text: str) -> None:
    """Replace what stands between the two markers."""
    before, begin, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"Invalid {readme}: must contain {BEGIN} and {END}, in this order.")
    readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


def plot(found: dict[str, Any], path: Path) -> None:
    """Times of steps, and what share of a copy's bandwidth each pass reaches."""
    rows, ranks, size = read_steps(found)
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5), layout="constrained")
    height = 0.4
    for offset, stage in ((-height / 2, "warmup"), (height / 2, "compression")):
        places = [place + offset for place, (_, row) in enumerate(rows) if stage in row]
        bars = left.barh(places, [milliseconds(row[stage]) for _, row in rows if stage in row], height, label=stage)
        left.bar_label(bars, fmt=lambda value: f"{value:.3g}" if value < 100 else f"{value:.0f}", padding=2)
    left.set(title=f"step, ms ({size} parameters, {ranks} ranks)", xscale="log")
    left.set_yticks(range(len(rows)), [label.replace("`", "") for label, _ in rows])
    left.set_xlim(right=2 * left.get_xlim()[1])  # room for the numbers

    shares: dict[str, dict[str, float]] = {}
    for bench in found["benchmarks"]:
        if bench["name"].startswith("bench_pass[") and bench["params"]["size"] == size:
            info = bench["extra_info"]
            if info["bytes"] < info["elements"]:
                continue  # it works on tables and headers
            name, backend = bench["params"]["name"], bench["params"]["backend"]
            shares.setdefault(backend, {})[name] = info["share of copy"]
    names = list(dict.fromkeys(name for passes in shares.values() for name in passes))
    height = 0.8 / max(1, len(shares))
    for number, (backend, passes) in enumerate(shares.items()):
        places = [names.index(name) + (number - (len(shares) - 1) / 2) * height for name in passes]
        right.barh(places, list(passes.values()), height, label=backend)
    right.axvline(1.0, color="grey", linewidth=1)
    right.set(title="bandwidth of passes, as a share of a copy's")
    right.set_yticks(range(len(names)), names)
    for axes in (left, right):
        axes.invert_yaxis()
        if axes.containers:
            axes.legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, help="what --benchmark-json wrote")
    parser.add_argument("--readme", type=Path, default=Path("README.md"), help="file with the markers")
    parser.add_argument("--plot", type=Path, default=Path("docs/benchmarks.png"))
    options = parser.parse_args()
    found = json.loads(options.json.read_text())
    write_table(options.readme, table(found))
    plot(found, options.plot)


if __name__ == "__main__":
    main()
