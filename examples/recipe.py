"""What the recipes for trainers share: the command line, the optimizer, and the file with the results."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from corpus import training_batch
from model import ModelConfig
from torch.optim.lr_scheduler import LambdaLR
from train_lm import learning_rate_factor

from onebit_triton import OneBitLamb


def make_parser(description: str) -> argparse.ArgumentParser:
    """Make the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--steps", type=int, default=250, help="optimizer steps in all")
    parser.add_argument("--freeze-step", type=int, default=50, help="steps before compression starts")
    parser.add_argument("--lr", type=float, default=0.012, help="peak learning rate")
    parser.add_argument("--beta2", type=float, default=0.99, help="decay of the variance")
    parser.add_argument("--batch-size", type=int, default=2, help="sequences per process and backward pass")
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes per step")
    parser.add_argument("--seed", type=int, default=0, help="seeds the initial weights and the batches")
    parser.add_argument("--checkpoints", type=Path, default=Path("out/checkpoints"), help="folder to save to")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--resume", type=Path, metavar="CHECKPOINT", help="continue from there")
    parser.add_argument("--out", type=Path, help="write losses and bytes to this JSON file")
    return parser


def make_optimizer(args: argparse.Namespace, parameters: Iterable[torch.nn.Parameter]) -> OneBitLamb:
    """Make the optimizer, without weight decay for biases and norms.

    It clips by itself, so the trainer must not: in compression each rank would clip its own gradient by its own norm.
    """
    matrices, vectors = [], []
    for parameter in parameters:
        (matrices if parameter.ndim > 1 else vectors).append(parameter)
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    return OneBitLamb(groups, lr=args.lr, betas=(0.9, args.beta2), freeze_step=args.freeze_step, max_grad_norm=1.0)


def make_schedule(args: argparse.Namespace, optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Make the learning rate's schedule, one step of it per step of the optimizer."""
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, args.steps))


def micro_batch(
    args: argparse.Namespace, text: torch.Tensor, number: int, rank: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw what a rank sees in one backward pass; a function of the pass's number, so nothing of it is ever saved."""
    return training_batch(
        text, sequences=args.batch_size, context=ModelConfig().context, seed=args.seed, step=number, rank=rank,
        world_size=world_size,
    )  # fmt: skip


def report(args: argparse.Namespace, optimizer: OneBitLamb, losses: list[float], **more: Any) -> None:
    """Print a line and write the JSON file; call it on one rank.

    Args:
        args: the command line.
        optimizer: ours, not the trainer's wrapper.
        losses: of the steps that this process took.
        more: what else goes into the file.
    """
    traffic = " and ".join(f"{count / 1e6:.1f} MB in {stage}" for stage, count in optimizer.bytes_sent.items())
    print(f"last loss {losses[-1]:.4f}; {traffic} sent by this rank", flush=True)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        last = optimizer.metrics()["bytes_sent_last_step"]
        result = {"losses": losses, "bytes_sent": optimizer.bytes_sent, "bytes_sent_last_step": last, **more}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
