"""Continue a compressed training at other numbers of ranks, with its pending errors and without them.

    torchrun --nproc-per-node 4 examples/resume.py

Trains a small byte-level transformer on four and on two ranks, saves one consolidated state in compression, and goes on
from it at the same and at other numbers of ranks: once as it was saved, once with the pending errors dropped. A step
sees the same sequences whatever the number of ranks, so that losses can be compared step by step. Prints a table and
writes every number to a file.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.distributed as dist
from corpus import load_corpus, training_batch
from model import ByteTransformer, ModelConfig
from train_lm import learning_rate_factor

from onebit_triton import OneBitLamb

RESTARTS = {4: (4, 2, 1), 2: (3,)}
"""Ranks that save -> ranks that continue."""
SEQUENCES = 12
"""Per step, over all ranks: divisible by every number of ranks above."""


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save-at", type=int, default=100, help="steps before the state is saved")
    parser.add_argument("--more", type=int, default=20, help="steps after it")
    parser.add_argument("--freeze-step", type=int, default=40, help="steps before compression starts")
    parser.add_argument("--lr", type=float, default=0.012, help="peak learning rate")
    parser.add_argument("--width", type=int, default=64, help="of the model, a multiple of 32")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each kind")
    parser.add_argument("--out", type=Path, default=Path("out/resume.json"), help="file for the results")
    return parser.parse_args()


class Training:
    """One training on the first ranks of all."""

    def __init__(self, args: argparse.Namespace, text: torch.Tensor, seed: int, group: dist.ProcessGroup) -> None:
        self.args, self.text, self.seed, self.group = args, text, seed, group
        torch.manual_seed(seed)
        self.config = ModelConfig(layers=1, width=args.width, heads=args.width // 32, context=64)
        self.model = ByteTransformer(self.config)
        self.optimizer = OneBitLamb(
            self.model.named_parameters(), lr=args.lr, betas=(0.9, 0.99), freeze_step=args.freeze_step,
            process_group=group,
        )  # fmt: skip

    def train(self, steps: range) -> list[float]:
        """Take some steps; the loss of each, a mean over all ranks."""
        losses = []
        for step in steps:
            rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
            loss = self.model(
                *training_batch(
                    self.text, sequences=SEQUENCES // ranks, context=self.config.context, seed=self.seed, step=step,
                    rank=rank, world_size=ranks,
                )
            )  # fmt: skip
            self.optimizer.zero_grad()
            loss.backward()
            for group in self.optimizer.param_groups:
                group["lr"] = self.args.lr * learning_rate_factor(step, self.args.save_at + self.args.more)
            self.optimizer.step()
            dist.all_reduce(loss := loss.detach(), group=self.group)
            losses.append(loss.item() / ranks)
        return losses

    def save(self, file: Path) -> None:
        """Write one file that serves any number of ranks."""
        self.optimizer.consolidate_errors()
        if dist.get_rank(self.group) == 0:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)

    def load(self, file: Path, drop_errors: bool) -> None:
        """Continue from there."""
        state = torch.load(file, weights_only=True)
        if drop_errors:
            for entry in state["optimizer"]["state"].values():
                entry["pending_error"].zero_()
            for group in state["optimizer"]["param_groups"]:
                group["onebit_lamb"]["tensors"] = 0  # on purpose: they need not be those that were saved
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def parameters(self) -> torch.Tensor:
        """Return all of them as one fp32 [elements] tensor."""
        return torch.cat([parameter.detach().reshape(-1) for parameter in self.model.parameters()])


def restart(args: argparse.Namespace, text: torch.Tensor, seed: int, savers: int) -> list[dict[str, Any]]:
    """Train, save, go on; and go on from the file at other numbers of ranks. Every process calls it."""
    file, end = args.out.with_suffix(".pt"), args.save_at + args.more
    groups = {ranks: dist.new_group(range(ranks)) for ranks in (savers, *RESTARTS[savers])}
    rank, results = dist.get_rank(), []
    if rank < savers:
        training = Training(args, text, seed, groups[savers])
        training.train(range(args.save_at))
        training.save(file)
        saved_at = training.parameters()
        uninterrupted, wanted = training.train(range(args.save_at, end)), training.parameters()
    dist.barrier()  # the file is there
    for ranks in RESTARTS[savers]:
        result: dict[str, Any] = {"seed": seed, "savers": savers, "ranks": ranks}
        for kind, drop_errors in (("kept", False), ("dropped", True)):
            if rank < ranks:
                training = Training(args, text, seed, groups[ranks])
                training.load(file, drop_errors)
                losses = training.train(range(args.save_at, end))
                if rank == 0:  # which is among the savers, too
                    away = (training.parameters() - wanted).norm() / (wanted - saved_at).norm()
                    result |= {kind: losses, f"{kind}_distance": away.item(), "uninterrupted": uninterrupted}
        results.append(result)
    dist.barrier()
    return results


def make_table(results: list[dict[str, Any]], more: int) -> str:
    """Tabulate means over seeds: losses of the first steps, and how far from the uninterrupted run parameters end.

    Differences of losses come with their standard deviation over seeds; distances are shares of the way that the
    uninterrupted run went meanwhile.
    """
    lines = [
        "| ranks | first steps | loss, uninterrupted | errors kept | errors dropped | distance, kept | dropped |",
        "|---" * 7 + "|",
    ]
    cases = defaultdict(list)
    for result in results:
        cases[result["savers"], result["ranks"]].append(result)
    for (savers, ranks), runs in cases.items():
        distances = [f"{mean(run[f'{kind}_distance'] for run in runs):.3f}" for kind in ("kept", "dropped")]
        for steps in sorted({min(steps, more) for steps in (5, 10, 20)}):
            base = [mean(run["uninterrupted"][:steps]) for run in runs]
            shown = []
            for kind in ("kept", "dropped"):
                differences = [mean(run[kind][:steps]) - one for run, one in zip(runs, base, strict=True)]
                spread = stdev(differences) if len(runs) > 1 else 0.0
                shown.append(f"{mean(differences):+.4f} ± {spread:.4f}")
            ends = distances if steps == min(20, more) else ["", ""]
            row = [f"{savers} -> {ranks}", str(steps), f"{mean(base):.4f}", *shown, *ends]
            lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Train, and write the table."""
    args = parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    text, results = load_corpus().train, []
    for seed in range(args.seeds):
        for savers in RESTARTS:
            results += restart(args, text, seed, savers)
    if dist.get_rank() == 0:
        print(make_table(results, args.more), end="", flush=True)
        args.out.write_text(json.dumps({"restarts": results}, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
