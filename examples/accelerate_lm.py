"""Train a byte-level transformer under Hugging Face Accelerate with 1-bit LAMB.

torchrun --nproc-per-node 2 examples/accelerate_lm.py     # or, on GPUs, accelerate launch --num_processes 2
torchrun --nproc-per-node 3 examples/accelerate_lm.py --resume out/checkpoints/step-100
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from corpus import load_corpus
from model import ByteTransformer, ModelConfig
from recipe import make_optimizer, make_parser, make_schedule, micro_batch, report


def main() -> None:
    """Train."""
    args = make_parser(__doc__).parse_args()
    # Started by torchrun, Accelerate takes no notice of the other processes on a CPU unless it is told to use it.
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=args.accumulate)
    set_seed(args.seed)
    text = load_corpus().train
    model = accelerator.prepare(ByteTransformer(ModelConfig()))
    # After the model was prepared, which moves the parameters to the device.
    optimizer = make_optimizer(args, model.parameters())
    if accelerator.num_processes > 1:
        optimizer.attach(model)
    # Accelerate's wrapper steps when the gradients are complete. Everything else is asked of the optimizer itself.
    prepared = accelerator.prepare(optimizer)
    # Not prepared: Accelerate would step it once per process.
    scheduler = make_schedule(args, optimizer)
    accelerator.register_for_checkpointing(scheduler)
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
                prepared.step()
                prepared.zero_grad()
            losses[-1] += loss.item() / args.accumulate
        scheduler.step()
        if step % 10 == 9:
            accelerator.print(f"step {step + 1} ({optimizer.stage}): loss {losses[-1]:.3f}")
        if (step + 1) % args.save_every == 0:
            # On every rank: Accelerate saves the optimizer of the main process, and each has errors still to be sent.
            optimizer.consolidate_errors()
            accelerator.save_state(args.checkpoints / f"step-{step + 1}")
    if accelerator.is_main_process:
        report(args, optimizer, losses)
    accelerator.end_training()


if __name__ == "__main__":
    main()
