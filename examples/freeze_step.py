"""Train one small language model with many freeze steps and values of beta2, and tabulate loss and traffic.

    python examples/freeze_step.py

Every training is `train_lm.py` with the same seed and the same batches, on CPU processes, one training after the other.
Writes a JSON file, a log of metrics per training, and table.md to out/freeze-step/; trainings whose file is there are
not repeated. docs/freeze-step.md shows and discusses the table.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from launch import run_training


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps of each training")
    parser.add_argument("--freeze-steps", type=int, nargs="+", help="default: 1/20, 1/10, 1/5 and 1/2 of the steps")
    parser.add_argument("--beta2", type=float, nargs="+", default=[0.9, 0.99, 0.999], help="decays of the variance")
    parser.add_argument("--width", type=int, default=96, help="of the model")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences per step, over all processes")
    parser.add_argument("--eval-sequences", type=int, default=512, help="held-out sequences in all")
    parser.add_argument("--processes", type=int, default=2, help="of each training")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--out", type=Path, default=Path("out/freeze-step"), help="folder for the results")
    args = parser.parse_args()
    if args.freeze_steps is None:
        args.freeze_steps = [max(1, args.steps // part) for part in (20, 10, 5, 2)]
    return args


def train(beta2: float, freeze_step: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run one training, or read what it left; a freeze step beyond the last step makes it LAMB."""
    name = f"seed{args.seed}-beta2-{beta2}-freeze-{freeze_step if freeze_step <= args.steps else 'never'}"
    result, metrics = args.out / f"{name}.json", args.out / f"{name}.jsonl"
    if result.exists():
        return json.loads(result.read_text())
    metrics.unlink(missing_ok=True)
    options = ["--device=cpu", f"--metrics={metrics}", f"--steps={args.steps}", f"--freeze-step={freeze_step}"]
    options += [f"--beta2={beta2}", f"--width={args.width}", f"--seed={args.seed}"]
    options += [f"--batch-size={max(1, args.batch_size // args.processes)}"]
    return run_training(args.processes, name, result, [*options, f"--eval-sequences={args.eval_sequences}"])


def main() -> None:
    """Train, and write the table."""
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    heads = [f"loss at beta2 {beta2}" for beta2 in args.beta2]
    lines = [f"| freeze_step | share | MB sent per rank | {' | '.join(heads)} |", "|---" * (3 + len(heads)) + "|"]
    for freeze_step in [*args.freeze_steps, args.steps + 1]:
        runs = [train(beta2, freeze_step, args) for beta2 in args.beta2]
        sent = sum(runs[0]["optimizer"]["bytes_sent"].values()) / 1e6
        losses = " | ".join(f"{run['held_out_loss']:.3f}" for run in runs)
        shown = "never (LAMB) | 100%" if freeze_step > args.steps else f"{freeze_step} | {freeze_step / args.steps:.0%}"
        lines.append(f"| {shown} | {sent:.1f} | {losses} |")
    table = "\n".join(lines) + "\n"
    (args.out / "table.md").write_text(table)
    sys.stdout.write(table)


if __name__ == "__main__":
    main()
