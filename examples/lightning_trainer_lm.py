"""Train a byte-level transformer under the Lightning Trainer with 1-bit LAMB.

torchrun --nproc-per-node 2 examples/lightning_trainer_lm.py
torchrun --nproc-per-node 3 examples/lightning_trainer_lm.py --resume out/checkpoints/step=100.ckpt     # any number
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from typing import Any

import torch
from corpus import load_corpus
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from model import ByteTransformer, ModelConfig
from recipe import make_optimizer, make_parser, make_schedule, micro_batch, report


class OneBitDDP(DDPStrategy):
    """DDP that averages gradients in the optimizer's warmup and leaves them local afterwards."""

    def setup(self, trainer: Trainer) -> None:
        """Attach the optimizers when the model has become a DistributedDataParallel."""
        super().setup(trainer)
        for optimizer in self.optimizers:
            optimizer.attach(self.model)


class LanguageModel(LightningModule):
    """The model, its optimizer and its batches."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.args = args
        self.model = ByteTransformer(ModelConfig())
        self.losses: list[float] = []

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Return the loss of one backward pass."""
        loss = self.model(*batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> dict[str, Any]:
        """Make the optimizer, and its schedule in steps."""
        optimizer = make_optimizer(self.args, self.parameters())
        schedule = {"scheduler": make_schedule(self.args, optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def train_dataloader(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield this rank's batches from the present step on."""
        text, trainer = load_corpus().train, self.trainer
        numbers = range(trainer.global_step * self.args.accumulate, self.args.steps * self.args.accumulate)
        return (micro_batch(self.args, text, n, trainer.global_rank, trainer.world_size) for n in numbers)


def main() -> None:
    """Train."""
    args = make_parser(__doc__).parse_args()
    seed_everything(args.seed)
    saver = ModelCheckpoint(args.checkpoints, "{step}", every_n_train_steps=args.save_every, save_top_k=-1)
    trainer = Trainer(
        max_steps=args.steps,
        accumulate_grad_batches=args.accumulate,
        gradient_clip_val=None,  # the optimizer clips
        strategy=OneBitDDP(),
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        callbacks=[saver],
        logger=False,
        enable_model_summary=False,
    )
    module = LanguageModel(args)
    trainer.fit(module, ckpt_path=args.resume)
    if trainer.is_global_zero:
        per_step = torch.tensor(module.losses, dtype=torch.float64).view(-1, args.accumulate).mean(1)
        report(args, trainer.optimizers[0], per_step.tolist())


if __name__ == "__main__":
    main()
