"""One rank of the trainings that are compared. Run by `ranks.Ranks`, which sends it commands; see `Rank`.

All methods train the same model from the same weights on the same batches, side by side in the same processes, so that
they can take turns and a slow moment of the machine hits all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from corpus import Corpus, held_out_batches, load_corpus, training_batch
from model import ByteTransformer, ModelConfig
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from onebit_triton import OneBitLamb

from . import METHODS

SEQUENCES = 2
"""Per rank and step."""

BETAS, EPS, WEIGHT_DECAY = (0.9, 0.99), 1e-8, 0.01

POWER_SGD_RANK = 4

TIMEOUT = timedelta(minutes=5)
"""For one collective; compiling on one rank keeps the others waiting in the next."""


def with_rival_lamb(model: torch.nn.Module, lr: float, **ddp: Any) -> tuple[DistributedDataParallel, Optimizer]:
    """DDP and pytorch-optimizer's Lamb."""
    from pytorch_optimizer import Lamb

    optimizer = Lamb(model.parameters(), lr=lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY)
    return DistributedDataParallel(model, **ddp), optimizer


def prepare(
    method: str, model: torch.nn.Module, lr: float, warmup: int, backend: str
) -> tuple[torch.nn.Module, Optimizer]:
    """Wrap a model as a method does, and make its optimizer.

    Args:
        method: one of `METHODS`.
        model: what to train.
        lr: learning rate.
        warmup: steps at full precision, for the methods that begin so.
        backend: of OneBitLamb.
    """
    if method == "onebit":
        onebit = OneBitLamb(
            model.parameters(), lr=lr, freeze_step=warmup, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY,
            backend=backend,
        )  # fmt: skip
        return onebit.attach(DistributedDataParallel(model)), onebit
    if method == "powersgd":
        # With several buckets its collectives deadlock over gloo: one that holds the whole model.
        ddp, optimizer = with_rival_lamb(model, lr, bucket_cap_mb=1 << 20)
        state = PowerSGDState(None, matrix_approximation_rank=POWER_SGD_RANK, start_powerSGD_iter=max(2, warmup))
        ddp.register_comm_hook(state, powerSGD_hook)
        return ddp, optimizer
    ddp, optimizer = with_rival_lamb(model, lr)
    if method == "fp16":
        ddp.register_comm_hook(None, fp16_compress_hook)
    return ddp, optimizer


class Training:
    """A model being trained by one method."""

    def __init__(self, method: str, config: ModelConfig, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)  # the same weights for every method and rank
        self.model = ByteTransformer(config)
        self.train_model, self.optimizer = prepare(method, self.model, options.lr, options.warmup, options.backend)
        rise = max(1, options.warmup // 2)
        self.scheduler = LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / rise))
        self.steps = 0

    def backward(self, model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Forward and backward."""
        loss = model(*batch)
        self.optimizer.zero_grad()
        loss.backward()

    def step(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        """One whole step."""
        self.backward(self.train_model, batch)
        self.optimizer.step()
        self.scheduler.step()
        self.steps += 1


class Rank:
    """Answers commands. Every rank gets the same ones, since all but `compute` are collective.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.config = ModelConfig(layers=options.layers, width=options.width, heads=options.heads, context=64)
        self.corpus: Corpus = load_corpus()
        self.seed = options.seed
        self.trainings = {method: Training(method, self.config, options) for method in options.methods}

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's part of the batch of a step."""
        return training_batch(
            self.corpus.train, sequences=SEQUENCES, context=self.config.context, seed=self.seed, step=step,
            rank=dist.get_rank(), world_size=dist.get_world_size(),
        )  # fmt: skip

    def parameters(self) -> int:
        """Number of parameters of the model."""
        return sum(p.numel() for p in next(iter(self.trainings.values())).model.parameters())

    def train(self, method: str, steps: int) -> dict[str, Any]:
        """Take steps; the seconds of each, and what the optimizer says it has sent so far if it does."""
        training = self.trainings[method]
        dist.barrier()
        seconds, before = [], time.perf_counter()
        for _ in range(steps):
            training.step(self.batch(training.steps))
            now = time.perf_counter()
            seconds.append(now - before)
            before = now
        optimizer = training.optimizer
        onebit = isinstance(optimizer, OneBitLamb)
        return {
            "seconds": seconds,
            "stage": optimizer.stage if onebit else None,
            "bytes_sent": optimizer.bytes_sent if onebit else None,
        }

    def compute(self, method: str, steps: int) -> dict[str, Any]:
        """Forward and backward without exchange or update, as often as steps; the seconds of each."""
        training = self.trainings[method]
        dist.barrier()
        seconds, before = [], time.perf_counter()
        for number in range(steps):
            training.backward(training.model, self.batch(number))
            now = time.perf_counter()
            seconds.append(now - before)
            before = now
        return {"seconds": seconds}

    @torch.no_grad()
    def evaluate(self, method: str, sequences: int) -> float:
        """Mean held-out loss in nats per byte, the same on every rank."""
        total = torch.zeros(2, dtype=torch.float64)  # sum of losses, sequences
        batches = held_out_batches(
            self.corpus.held_out, sequences=sequences, context=self.config.context, batch=16, rank=dist.get_rank(),
            world_size=dist.get_world_size(),
        )  # fmt: skip
        for tokens, targets in batches:
            loss = self.trainings[method].model(tokens, targets)
            total += torch.stack([loss.double() * len(tokens), torch.tensor(len(tokens), dtype=torch.float64)])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def answer(self, command: dict[str, Any]) -> Any:
        """Carry out {"do": name of a method of this class, ...its arguments}."""
        return getattr(self, command.pop("do"))(**command)


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--warmup", type=int, required=True, help="steps at full precision before compression")
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", required=True, help="of OneBitLamb")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--heads", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    """Answer commands, JSON in a line each, from stdin to stdout until there are no more."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not come between the answers
    options = parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank = Rank(options)
    for line in sys.stdin:
        print(json.dumps(rank.answer(json.loads(line))), file=answers)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
