"""Train a byte-level transformer under Lightning Fabric with 1-bit LAMB.

torchrun --nproc-per-node 2 examples/lightning_fabric_lm.py
torchrun --nproc-per-node 3 examples/lightning_fabric_lm.py --resume out/checkpoints/step-100.ckpt     # any number
"""

from __future__ import annotations

import os
from typing import Any

from corpus import load_corpus
from lightning.fabric import Fabric
from lightning.fabric.strategies import DDPStrategy
from model import ByteTransformer, ModelConfig
from recipe import make_optimizer, make_parser, make_schedule, micro_batch, report


class OneBitDDP(DDPStrategy):
    """DDP that averages gradients in the optimizer's warmup and leaves them local afterwards."""

    def setup_module_and_optimizers(self, *args: Any) -> tuple[Any, ...]:
        """Attach the optimizers when the model has become a DistributedDataParallel."""
        model, optimizers, *rest = super().setup_module_and_optimizers(*args)
        for optimizer in optimizers:
            optimizer.attach(model)
        return model, optimizers, *rest


def main() -> None:
    """Train."""
    args = make_parser(__doc__).parse_args()
    fabric = Fabric(devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), strategy=OneBitDDP())
    fabric.launch()
    fabric.seed_everything(args.seed)
    text = load_corpus().train
    with fabric.init_module():  # on its device at once, where the optimizer makes its state
        net = ByteTransformer(ModelConfig())
    optimizer = make_optimizer(args, net.parameters())
    scheduler = make_schedule(args, optimizer)
    # Fabric's wrapper is not needed below, and has only copies of what the optimizer knows.
    model, _ = fabric.setup(net, optimizer)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if args.resume:
        fabric.load(args.resume, state)

    losses = []
    for step in range(scheduler.last_epoch, args.steps):
        losses.append(0.0)
        optimizer.zero_grad()
        for number in range(step * args.accumulate, (step + 1) * args.accumulate):
            tokens, targets = micro_batch(args, text, number, fabric.global_rank, fabric.world_size)
            complete = number == (step + 1) * args.accumulate - 1
            with fabric.no_backward_sync(model, enabled=not complete):
                loss = model(tokens.to(fabric.device), targets.to(fabric.device)) / args.accumulate
                fabric.backward(loss)
            losses[-1] += loss.item()
        optimizer.step()
        scheduler.step()
        if step % 10 == 9:
            fabric.print(f"step {step + 1} ({optimizer.stage}): loss {losses[-1]:.3f}")
        if (step + 1) % args.save_every == 0:
            # On every rank, the optimizer gathers what all have still to send; then the main process writes one file.
            fabric.save(args.checkpoints / f"step-{step + 1}.ckpt", state)
    if fabric.is_global_zero:
        report(args, optimizer, losses)


if __name__ == "__main__":
    main()
