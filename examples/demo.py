"""Train the same model twice, with LAMB and with 1-bit LAMB, and compare loss and traffic.

    python examples/demo.py

Both trainings are `train_lm.py` with the same seed and the same batches, on four CPU processes, or on one process per
GPU where there are GPUs. LAMB is the same optimizer kept in its warmup. Writes out/demo/: one JSON file per training,
summary.json with the table's numbers, and demo.png. Exits with an error if 1-bit LAMB's held-out loss is more than 2 %
above LAMB's.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import matplotlib
import torch
from launch import run_training

matplotlib.use("Agg")  # no display needed
from matplotlib import pyplot

LAMB, ONE_BIT = "LAMB", "1-bit LAMB"
TOLERANCE = 0.02
COLOURS = {LAMB: "#4878a8", ONE_BIT: "#d1603d"}


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=250, help="optimizer steps of each training")
    parser.add_argument("--freeze-step", type=int, help="warmup steps of 1-bit LAMB (default: a fifth of --steps)")
    parser.add_argument("--lr", type=float, default=0.012, help="peak learning rate")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step, over all processes")
    parser.add_argument("--eval-sequences", type=int, default=512, help="held-out sequences in all")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--processes", type=int, help="default: one per GPU, or 4 on the CPU")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is")
    parser.add_argument("--plain", action="store_true", help="without DistributedDataParallel")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder for the results")
    args = parser.parse_args()
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.processes = args.processes or (torch.cuda.device_count() if args.device == "cuda" else 4)
    args.freeze_step = args.freeze_step or max(1, args.steps // 5)
    return args


def train(label: str, freeze_step: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run one training in processes of its own.

    Returns:
        What `train_lm.py` wrote.
    """
    result = args.out / f"{label.lower().replace(' ', '-')}.json"
    result.unlink(missing_ok=True)  # never report an older run
    options = [f"--device={args.device}", f"--seed={args.seed}", f"--steps={args.steps}", f"--lr={args.lr}"]
    options += [f"--freeze-step={freeze_step}", f"--batch-size={max(1, args.batch_size // args.processes)}"]
    options += [f"--eval-sequences={args.eval_sequences}"]
    return run_training(args.processes, f"{label:10}", result, options + ["--plain"] * args.plain)


def summarise(runs: dict[str, dict[str, Any]], args: argparse.Namespace) -> dict[str, Any]:
    """Collect the numbers of the table."""
    lamb, one_bit = runs[LAMB], runs[ONE_BIT]
    rows = {
        label: {
            "held_out_loss": run["held_out_loss"],
            "bytes_sent_per_rank": run["optimizer"]["bytes_sent"],
            "bytes_sent_per_rank_total": sum(run["optimizer"]["bytes_sent"].values()),
            "state_bytes_per_parameter": run["optimizer"]["state_bytes"] / run["optimizer"]["elements"],
            "skipped_steps": run["optimizer"]["skipped_steps"],
            "seconds": run["history"]["seconds"],
        }
        for label, run in runs.items()
    }
    warmup_step = rows[LAMB]["bytes_sent_per_rank_total"] / args.steps
    compressed_step = rows[ONE_BIT]["bytes_sent_per_rank"]["compression"] / max(1, args.steps - args.freeze_step)
    total = rows[ONE_BIT]["bytes_sent_per_rank_total"]
    difference = rows[ONE_BIT]["held_out_loss"] / rows[LAMB]["held_out_loss"] - 1
    return {
        "runs": rows,
        "loss_difference": difference,
        "loss_tolerance": TOLERANCE,
        "within_tolerance": difference <= TOLERANCE,  # False for NaN
        "reduction_of_a_compressed_step": warmup_step / compressed_step if compressed_step else None,
        "reduction_of_the_whole_run": rows[LAMB]["bytes_sent_per_rank_total"] / total if total else None,
        "parameters": one_bit["optimizer"]["elements"],
        "padding": one_bit["optimizer"]["padded_elements"] / one_bit["optimizer"]["elements"] - 1,
        "masked_elements": one_bit["optimizer"]["masked_elements"],
        "steps": args.steps,
        "freeze_step": args.freeze_step,
        "learning_rate": args.lr,
        "seed": args.seed,
        "device": lamb["device"],
        "processes": lamb["processes"],
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }


def print_table(summary: dict[str, Any]) -> None:
    """Print both runs side by side, then what it comes to."""
    lines: list[tuple[str, ...]] = [("", "held-out loss", "warmup MB", "compression MB", "total MB", "state B/param")]
    for label, row in summary["runs"].items():
        sent = row["bytes_sent_per_rank"]
        megabytes = (sent["warmup"], sent["compression"], row["bytes_sent_per_rank_total"])
        numbers = [f"{row['held_out_loss']:.4f}"] + [f"{count / 1e6:,.1f}" for count in megabytes]
        lines.append((label, *numbers, f"{row['state_bytes_per_parameter']:.2f}"))
    print(f"\n{summary['parameters']:,} parameters, {summary['steps']} steps, {summary['processes']} processes")
    print("held-out loss in nats per byte; MB sent per rank, as counted where they are sent\n")
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([line[0].ljust(widths[0]), *cells]))
    print()
    if summary["reduction_of_a_compressed_step"]:
        step, run = summary["reduction_of_a_compressed_step"], summary["reduction_of_the_whole_run"]
        print(f"bytes: a compressed step sends {step:.1f}x less, the whole run {run:.2f}x less")
    else:
        print("bytes: one process alone exchanges nothing; try --device cpu, which starts four")
    print(f"loss:  {ONE_BIT} is {summary['loss_difference']:+.2%} from {LAMB} (allowed: up to {TOLERANCE:+.0%})")
    for label, row in summary["runs"].items():
        if row["skipped_steps"]:
            print(f"note:  {label} skipped {row['skipped_steps']} steps with gradients that were not finite")


def plot(runs: dict[str, dict[str, Any]], summary: dict[str, Any], path: Path) -> None:
    """Draw training loss and cumulative traffic of both runs against the step."""
    figure, (loss_axes, byte_axes) = pyplot.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for label, run in runs.items():
        loss, row = run["history"]["loss"], summary["runs"][label]
        steps = range(1, len(loss) + 1)
        window = max(1, len(loss) // 30)
        smooth = [sum(loss[max(0, i - window) : i]) / min(i, window) for i in steps]
        loss_axes.plot(steps, loss, color=COLOURS[label], alpha=0.25, linewidth=0.8)
        loss_label = f"{label} (held out: {row['held_out_loss']:.3f})"
        loss_axes.plot(steps, smooth, color=COLOURS[label], linewidth=1.6, label=loss_label)
        sent = [count / 1e6 for count in run["history"]["bytes_sent"]]
        byte_label = f"{label} ({row['bytes_sent_per_rank_total'] / 1e6:,.0f} MB)"
        byte_axes.plot(steps, sent, color=COLOURS[label], linewidth=1.8, label=byte_label)
    loss_axes.set(xlabel="step", ylabel="training loss (nats per byte)", title="Loss")
    byte_axes.set(xlabel="step", ylabel="MB sent per rank, cumulative", title="Traffic")
    byte_axes.set_ylim(bottom=0)
    # The first steps fall from ln(256) and would flatten the part in which the runs could differ.
    settled = [value for run in runs.values() for value in run["history"]["loss"][summary["steps"] // 10 :]]
    loss_axes.set_ylim(min(settled) - 0.1, max(settled) + 0.3)
    for axes in (loss_axes, byte_axes):
        axes.set_xlim(0, summary["steps"])
        axes.axvline(summary["freeze_step"], color="0.4", linestyle=":", linewidth=1, label="compression begins")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    loss_axes.legend(frameon=False, loc="upper right")
    byte_axes.legend(frameon=False, loc="upper left")
    place = f"{summary['processes']} {summary['device'].upper()} processes"
    figure.suptitle(f"Byte-level transformer, {summary['parameters'] / 1e6:.2f}M parameters, {place}", fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main() -> None:
    """Train twice, print the table, write the files."""
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    # One more than the steps: at the end of step freeze_step the buffers for compression are made, and would count as
    # LAMB's state.
    runs = {LAMB: train(LAMB, args.steps + 1, args), ONE_BIT: train(ONE_BIT, args.freeze_step, args)}
    summary = summarise(runs, args)
    (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    plot(runs, summary, args.out / "demo.png")
    print_table(summary)
    print(f"files: {', '.join(str(args.out / name) for name in ('summary.json', 'demo.png'))}")
    if not summary["within_tolerance"]:
        sys.exit(f"{ONE_BIT} missed the band: its loss is more than {TOLERANCE:.0%} above {LAMB}'s.")


if __name__ == "__main__":
    main()
