"""What the language models' recipes must compute, written without a trainer; run like them, see recipes.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from corpus import load_corpus
from model import ByteTransformer, ModelConfig
from recipe import make_optimizer, make_parser, make_schedule, micro_batch, report
from torch.nn.parallel import DistributedDataParallel

args = make_parser("").parse_args()
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(args.seed)
text = load_corpus().train
model = DistributedDataParallel(ByteTransformer(ModelConfig()))
optimizer = make_optimizer(args, model.parameters())
optimizer.attach(model)
scheduler = make_schedule(args, optimizer)
parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
if args.resume:
    saved = torch.load(args.resume, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
losses = []
for step in range(scheduler.last_epoch, args.steps):
    first, last = step * args.accumulate, (step + 1) * args.accumulate - 1
    losses.append(0.0)
    for number in range(first, last + 1):
        model.require_backward_grad_sync = number == last
        loss = model(*micro_batch(args, text, number, rank, world_size))
        (loss / args.accumulate).backward()
        losses[-1] += loss.item() / args.accumulate
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if (step + 1) % args.save_every == 0:
        optimizer.consolidate_errors()
        if rank == 0:
            args.checkpoints.mkdir(parents=True, exist_ok=True)
            torch.save({name: part.state_dict() for name, part in parts.items()}, args.checkpoints / f"{step + 1}.pt")
if rank == 0:
    report(args, optimizer, losses)
dist.destroy_process_group()
