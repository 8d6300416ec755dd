"""Compare trainings over slow, emulated networks.

    sudo .venv/bin/python -m benchmarks.network
    sudo .venv/bin/python -m benchmarks.network --ranks 2 --rates 10mbit 100mbit --steps 40

Ranks are processes of this machine in network namespaces, joined by a switch; tc limits every link in both directions.
Training is real: a transformer on the texts of Python's standard library. Needs Linux, root and iproute2. Everything
is removed at the end, whatever the end. Writes results.json, network.png and the ranks' logs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console

from . import METHODS, report, topology
from .measure import Settings, measure


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4, help="processes (default: 4)")
    parser.add_argument(
        "--rates", nargs="+", default=["100mbit", "1gbit"],
        help="of the links (default: 100mbit 1gbit); unshaped is always measured, predictions start from it",
    )  # fmt: skip
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default: all")
    parser.add_argument("--steps", type=int, default=200, help="of the training that is scored (default: 200)")
    parser.add_argument("--warmup", type=int, help="steps at full precision (default: a fifth of --steps)")
    parser.add_argument("--rounds", type=int, default=4, help="in which methods take turns, per rate (default: 4)")
    parser.add_argument("--round-steps", type=int, default=3, help="timed steps of a method in a round (default: 3)")
    parser.add_argument("--sequences", type=int, default=512, help="held out, to score (default: 512)")
    parser.add_argument("--lr", type=float, default=0.005, help="of all methods (default: 0.005)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--backend", default="inductor", help="of OneBitLamb (default: inductor)")
    parser.add_argument("--layers", type=int, default=6, help="of the model (default: 6)")
    parser.add_argument("--width", type=int, default=320, help="of the model (default: 320)")
    parser.add_argument("--heads", type=int, default=5, help="of the model (default: 5)")
    parser.add_argument("--output", type=Path, default=Path("out/network"), help="folder (default: out/network)")
    options = parser.parse_args()
    if reason := topology.missing():
        parser.error(f"cannot emulate a network: {reason}")
    if not {"fp32", report.ONE_BIT} <= set(options.methods):
        parser.error(f"--methods must contain fp32 and {report.ONE_BIT}: ratios and predictions refer to them")
    try:
        for rate in options.rates:
            topology.bits_per_second(rate)
    except ValueError as error:
        parser.error(str(error))
    if options.rounds < 1 or options.round_steps < 1 or options.rounds * options.round_steps < 2:
        parser.error("--rounds times --round-steps must be at least 2 timed steps")
    if options.warmup is None:
        options.warmup = max(1, options.steps // 5)
    return options


def main() -> None:
    """Measure, print, write."""
    options = parse_args()
    settings = vars(options) | {
        "rates": tuple(dict.fromkeys((*options.rates, topology.UNSHAPED))),
        "methods": tuple(options.methods),
    }
    output = settings.pop("output")
    results = measure(Settings(**settings), output)
    (output / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    report.plot(results, output / "network.png")
    console = Console()
    report.tables(results, console)
    for line in report.conclusions(results):
        console.print(line)
    console.print(f"Written: {output}")


if __name__ == "__main__":
    main()
