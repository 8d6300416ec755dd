"""Train a byte-level transformer under Hugging Face Accelerate with 1-bit LAMB.

accelerate launch --cpu --num_processes 2 examples/accelerate_lm.py     # or torchrun --nproc-per-node 2
accelerate launch --cpu --num_processes 2 examples/accelerate_lm.py --resume out/checkpoints/step-100
"""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from corpus import load_corpus
from model import ByteTransformer, ModelConfig
from recipe import make_optimizer, make_parser, make_schedule, micro_batch, report

from onebit_triton import OneBitLamb


def save_one_file_per_rank(accelerator: Accelerator, optimizer: OneBitLamb) -> None:
    """Make `save_state` and `load_state` handle the optimizer: in compression every rank has errors of its own."""

    def file(folder: str) -> Path:
        return Path(folder, f"optimizer.rank{accelerator.process_index}.bin")

    def save(models: list[torch.nn.Module], weights: list[dict], folder: str) -> None:
        torch.save(optimizer.state_dict(), file(folder))

    def load(models: list[torch.nn.Module], folder: str) -> None:
        optimizer.load_state_dict(torch.load(file(folder), map_location="cpu", weights_only=True))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def main() -> None:
    """Train."""
    args = make_parser(__doc__).parse_args()
    # Started by torchrun, Accelerate takes no notice of the other processes on a CPU unless it is told to use it.
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=args.accumulate)
    set_seed(args.seed)
    text = load_corpus().train
    model = accelerator.prepare(ByteTransformer(ModelConfig()))
    # After prepare, which moves the parameters to the device. The optimizer itself is not prepared: Accelerate's
    # wrapper would step when gradients are complete, as the loop does, and be saved by the main process alone.
    optimizer = make_optimizer(args, model.parameters())
    if accelerator.num_processes > 1:
        optimizer.attach(model)
    # Not prepared either: Accelerate would step it once per process.
    scheduler = make_schedule(args, optimizer)
    accelerator.register_for_checkpointing(scheduler)
    save_one_file_per_rank(accelerator, optimizer)
    if args.resume:
        accelerator.load_state(args.resume)

    losses = []
    for step in range(scheduler.last_epoch, args.steps):
        losses.append(0.0)
        for number in range(step * args.accumulate, (step + 1) * args.accumulate):
            tokens, targets = micro_batch(args, text, number, accelerator.process_index, accelerator.num_processes)
            with accelerator.accumulate(model):
                loss = model(tokens.to(accelerator.device), targets.to(accelerator.device))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            losses[-1] += loss.item() / args.accumulate
        if step % 10 == 9:
            accelerator.print(f"step {step + 1} ({optimizer.stage}): loss {losses[-1]:.3f}")
        if (step + 1) % args.save_every == 0:
            accelerator.save_state(args.checkpoints / f"step-{step + 1}")
    if accelerator.is_main_process:
        report(args, optimizer, losses)
    accelerator.end_training()


if __name__ == "__main__":
    main()
