"""Train a byte-level transformer on the standard library with 1-bit LAMB.

    torchrun --nproc-per-node 4 examples/train_lm.py                     # DistributedDataParallel
    torchrun --nproc-per-node 4 examples/train_lm.py --plain             # no DDP: the optimizer averages by itself
    torchrun --nproc-per-node 4 examples/train_lm.py --freeze-step 1000  # beyond --steps: LAMB, never compressed
    python examples/train_lm.py                                          # one process
    torchrun --nproc-per-node 4 --max-restarts 3 examples/train_lm.py --checkpoint out/lm  # goes on after a crash

One process per GPU where there are GPUs, otherwise processes on the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import checkpoints
import torch
import torch.distributed as dist
from corpus import Corpus, held_out_batches, load_corpus, training_batch
from model import ByteTransformer, ModelConfig
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

from onebit_triton import OneBitLamb
from onebit_triton.loggers import JsonLines


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--steps", type=int, default=250, help="optimizer steps in all")
    parser.add_argument("--freeze-step", type=int, help="steps before compression starts (default: a fifth)")
    parser.add_argument("--lr", type=float, default=0.012, help="peak learning rate")
    parser.add_argument("--beta2", type=float, default=0.99, help="decay of the variance")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences per process and step")
    parser.add_argument("--eval-sequences", type=int, default=512, help="held-out sequences in all")
    parser.add_argument("--seed", type=int, default=0, help="seeds the initial weights and the batches")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of parameters")
    parser.add_argument("--plain", action="store_true", help="without DistributedDataParallel")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda if there is")
    parser.add_argument("--backend", choices=("auto", "torch", "triton"), default="auto", help="of the optimizer")
    parser.add_argument("--layers", type=int, default=ModelConfig.layers, help="of the model")
    parser.add_argument("--width", type=int, default=ModelConfig.width, help="of the model, a multiple of 32")
    parser.add_argument("--label", default="training", help="text in front of the progress bar")
    parser.add_argument("--out", type=Path, help="write losses, bytes and settings to this JSON file")
    parser.add_argument("--metrics", type=Path, help="write the optimizer's metrics to this file after every step")
    parser.add_argument("--checkpoint", type=Path, metavar="FOLDER", help="save there, and continue from the newest")
    parser.add_argument("--save-every", type=int, default=100, metavar="STEPS", help="with --checkpoint")
    args = parser.parse_args()
    if args.freeze_step is None:
        args.freeze_step = max(1, args.steps // 5)
    return args


@dataclass(frozen=True)
class Worker:
    """This process: its device, its rank, and how many there are."""

    device: torch.device
    rank: int = 0
    world_size: int = 1


def init_distributed(choice: str) -> Worker:
    """Join the process group that torchrun describes in the environment, if it does."""
    use_cuda = torch.cuda.is_available() if choice == "auto" else choice == "cuda"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    if "RANK" not in os.environ:
        return Worker(device)
    store, rank, world_size = next(dist.rendezvous("env://"))
    # torchrun's store outlives the processes that it restarts. Without a prefix of its own the new group would find the
    # addresses of the dead ones there, and wait for them.
    store = dist.PrefixStore(f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}/{world_size}", store)
    dist.init_process_group(
        "nccl" if use_cuda else "gloo", store=store, rank=rank, world_size=world_size,
        device_id=device if use_cuda else None,
    )  # fmt: skip
    return Worker(device, rank, world_size)


def learning_rate_factor(step: int, steps: int) -> float:
    """Rise linearly over the first tenth of the steps, then fall as a cosine to a tenth of the peak."""
    ramp = max(1, steps // 10)
    if step < ramp:
        return (step + 1) / ramp
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - ramp) / max(1, steps - ramp)))


@dataclass
class History:
    """What training recorded, per step: mean loss over ranks, bytes sent by this rank so far, stage."""

    loss: list[float] = field(default_factory=list)
    bytes_sent: list[int] = field(default_factory=list)
    stage: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Trainer:
    """Model, optimizer and schedule of one process."""

    def __init__(self, args: argparse.Namespace, worker: Worker) -> None:
        self.args, self.worker, self.first_step = args, worker, 0
        torch.manual_seed(args.seed)  # the same weights on every rank, also without DDP
        self.config = ModelConfig(layers=args.layers, width=args.width, heads=args.width // 32)
        # Of bf16 and fp16 parameters the optimizer keeps fp32 masters; fp16 gradients also need a loss scale.
        self.model = ByteTransformer(self.config).to(worker.device, getattr(torch, args.dtype))
        self.scaler = GradScaler(worker.device.type, enabled=args.dtype == "float16")
        # The usual LAMB recipe: no weight decay on vectors. With names, which metrics and errors then show.
        named = list(self.model.named_parameters())
        matrices = [(name, p) for name, p in named if p.ndim > 1]
        vectors = [(name, p) for name, p in named if p.ndim <= 1]
        self.optimizer = OneBitLamb(
            [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
            lr=args.lr,
            # The variance is frozen at the switch. Its memory, 1 / (1 - beta2) steps, must not be much longer than the
            # warmup: 0.99 for these short trainings, 0.999 for warmups of thousands of steps.
            betas=(0.9, args.beta2),
            freeze_step=args.freeze_step,
            backend=args.backend,
        )
        self.scheduler = LambdaLR(self.optimizer, lambda step: learning_rate_factor(step, args.steps))
        self.log = JsonLines(args.metrics) if args.metrics else None
        self.train_model: torch.nn.Module = self.model
        if worker.world_size > 1 and not args.plain:
            # attach() makes DDP average in warmup and leave the gradients local afterwards. Without it DDP would go
            # on exchanging whole gradients, and the compressed momentum would come on top.
            self.train_model = self.optimizer.attach(DistributedDataParallel(self.model))

    def train(self, text: torch.Tensor) -> History:
        """Take the remaining steps."""
        args, worker, history = self.args, self.worker, History()
        # Losses stay on the device, and the bar reads every tenth: .item() makes the host wait for a GPU.
        losses = torch.zeros(args.steps, device=worker.device)
        started = time.perf_counter()
        bar = tqdm(
            range(self.first_step, args.steps),
            desc=args.label,
            disable=worker.rank != 0,
            initial=self.first_step,
            total=args.steps,
            mininterval=0.5 if sys.stderr.isatty() else 10.0,  # a log file keeps every update
            dynamic_ncols=True,
        )
        for step in bar:
            history.stage.append(self.optimizer.stage)
            losses[step] = self.train_step(text, step)
            history.bytes_sent.append(sum(self.optimizer.bytes_sent.values()))
            if step % 10 == 9:
                sent = f"{history.bytes_sent[-1] / 1e6:.1f} MB"
                loss = f"{losses[max(self.first_step, step - 9) : step + 1].mean().item():.3f}"
                bar.set_postfix(loss=loss, stage=history.stage[-1], sent=sent, refresh=False)
            if args.checkpoint and ((step + 1) % args.save_every == 0 or step + 1 == args.steps):
                self.save(step + 1)
        if worker.world_size > 1:
            dist.all_reduce(losses)
        history.loss = (losses / worker.world_size)[self.first_step :].tolist()
        history.seconds = time.perf_counter() - started
        return history

    def train_step(self, text: torch.Tensor, step: int) -> torch.Tensor:
        """Take one step; nothing in it depends on the optimizer's stage. Returns this rank's loss."""
        tokens, targets = training_batch(
            text,
            sequences=self.args.batch_size,
            context=self.config.context,
            seed=self.args.seed,
            step=step,
            rank=self.worker.rank,
            world_size=self.worker.world_size,
        )
        loss = self.train_model(tokens.to(self.worker.device), targets.to(self.worker.device))
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        if self.log:
            self.log(self.optimizer, loss=loss)
        return loss.detach()

    @torch.no_grad()
    def evaluate(self, text: torch.Tensor) -> float:
        """Return the mean held-out loss in nats per byte, the same number on every rank."""
        total = torch.zeros(2, dtype=torch.float64, device=self.worker.device)  # sum of losses, sequences
        for tokens, targets in held_out_batches(
            text,
            sequences=self.args.eval_sequences,
            context=self.config.context,
            batch=16,
            rank=self.worker.rank,
            world_size=self.worker.world_size,
        ):
            loss = self.model(tokens.to(self.worker.device), targets.to(self.worker.device))
            total += torch.stack([loss.double() * len(tokens), torch.full_like(loss, len(tokens)).double()])
        if self.worker.world_size > 1:
            dist.all_reduce(total)
        return (total[0] / total[1]).item()

    def save(self, step: int) -> None:
        """Write a checkpoint; one of any number of processes continues from it."""
        checkpoints.save(self.args.checkpoint, step, self.model, self.optimizer, **self.others())

    def resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        newest = checkpoints.newest(self.args.checkpoint)
        if newest is not None:
            self.first_step = checkpoints.load(newest, self.model, self.optimizer, **self.others())

    def others(self) -> dict[str, Any]:
        """Return what is saved besides model and optimizer."""
        return {"scheduler": self.scheduler, "scaler": self.scaler}


def report(trainer: Trainer, history: History, corpus: Corpus) -> None:
    """Print a line and write the JSON file, on rank 0."""
    held_out_loss = trainer.evaluate(corpus.held_out)
    args, sent = trainer.args, trainer.optimizer.bytes_sent
    if trainer.worker.rank != 0:
        return
    traffic = " and ".join(f"{count / 1e6:.1f} MB in {stage}" for stage, count in sent.items())
    print(f"{args.label}: held-out loss {held_out_loss:.4f} nats per byte; {traffic} sent by rank 0", flush=True)
    if args.out:
        result = {
            "settings": {name: str(v) if isinstance(v, Path) else v for name, v in vars(args).items()},
            "model": asdict(trainer.config),
            "device": trainer.worker.device.type,
            "processes": trainer.worker.world_size,
            "training_bytes": len(corpus.train),
            "held_out_loss": held_out_loss,
            "optimizer": trainer.optimizer.metrics(),
            "history": asdict(history),
        }
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    """Train, evaluate, report."""
    args = parse_args()
    worker = init_distributed(args.device)
    corpus = load_corpus()
    trainer = Trainer(args, worker)
    if args.checkpoint:
        trainer.resume()
    report(trainer, trainer.train(corpus.train), corpus)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
