"""Two gloo ranks that share one GPU: the collectives, and trajectories of both backends over them."""

from __future__ import annotations

import datetime
import logging
import multiprocessing
import os
import tempfile
import traceback
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from onebit_triton import OneBitLamb
from onebit_triton.collectives import Communicator

from .part import Part
from .steps import vector
from .tensors import TINY, Guarded, gradients, two_groups

RANKS = 2
STEPS, FREEZE, SKIPPED = 14, 5, (3, 9)
SHAPES = ((33, 7), (5,), (1,), (130,), (64, 3), (2, 3, 4))
"""Few elements: where a sum of the two backends differs in its last bit, a sign may turn, but hardly ever does."""

Finding = tuple[str, bool, str]


def _collectives(rank: int, device: torch.device) -> list[Finding]:
    """Every collective that the optimizer uses, with what it must give."""
    communicator = Communicator(None)
    sent = torch.arange(2 * 48, dtype=torch.uint8, device=device).view(RANKS, 48) + 100 * rank
    own = torch.full((5,), float(rank + 1), device=device)

    def all_to_all() -> bool:
        received = torch.zeros_like(sent)
        communicator.all_to_all(received, sent).wait()
        first = torch.arange(48, dtype=torch.uint8, device=device) + 48 * rank
        return torch.equal(received, torch.stack((first, first + 100)))

    def all_gather() -> bool:
        gathered = torch.zeros_like(sent)
        communicator.all_gather(gathered, sent[0]).wait()
        first = torch.arange(48, dtype=torch.uint8, device=device)
        return torch.equal(gathered, torch.stack((first, first + 100)))

    def all_reduce(dtype: torch.dtype) -> bool:
        summed = own.to(dtype, copy=True)
        communicator.all_reduce(summed).wait()
        return bool((summed == 3).all())

    def broadcast() -> bool:
        got = own.clone()
        communicator.broadcast(got)
        return bool((got == 1).all())

    calls = {"all_to_all": all_to_all, "all_gather": all_gather, "broadcast": broadcast}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        calls[f"all_reduce {dtype}"] = lambda dtype=dtype: all_reduce(dtype)

    def finding(name: str) -> Finding:
        try:
            return name, calls[name](), f"gloo, tensors on {device}"
        except Exception as error:
            return name, False, f"{type(error).__name__}: {error}"

    return [finding(name) for name in calls]


def _train(rank: int, device: torch.device, backend: str, shapes: tuple[tuple[int, ...], ...]) -> list[Tensor]:
    """Parameters after each step; a rank's gradient is not finite in one step of each stage."""
    guarded = Guarded(shapes, torch.float32, device)
    optimizer = OneBitLamb(
        two_groups(guarded.params), lr=0.01, freeze_step=FREEZE, max_grad_norm=0.2, backend=backend,
        block_elements=64, bucket_elements=512,
    )  # fmt: skip
    found = []
    for step in range(STEPS):
        for param, grad, value in zip(
            guarded.params, guarded.grads, gradients(step, rank, guarded.params), strict=True
        ):
            grad.copy_(value)
            param.grad = grad
        if step in SKIPPED and rank == 1:
            guarded.grads[0].view(-1)[0] = float("nan")
        optimizer.step()
        found.append(vector(guarded.params))
    progress = optimizer.metrics()
    assert progress["stage"] == "compression", progress["stage"]
    assert progress["skipped_steps"] == len(SKIPPED), progress["skipped_steps"]
    return found


def _train_ddp(rank: int, device: torch.device) -> list[Tensor]:
    """Parameters of a model under DDP after each step, warmup averaged by the hook."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(12, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1)).to(device)
    optimizer = OneBitLamb(model.parameters(), lr=0.01, freeze_step=3, backend="triton", block_elements=64)
    wrapped = optimizer.attach(DistributedDataParallel(model))
    found = []
    for step in range(6):
        generator = torch.Generator().manual_seed(10 * step + rank)
        optimizer.zero_grad()
        wrapped(torch.randn(8, 12, generator=generator).to(device)).square().mean().backward()
        optimizer.step()
        found.append(vector(list(model.parameters())))
    return found


def work(rank: int, store: str, kind: str, tiny: bool) -> dict[str, Any]:
    """What one process does; everything that it returns is on the host."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    logging.getLogger("onebit_triton").setLevel(logging.ERROR)
    device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
        import tests.interpreter  # noqa: F401
    shapes = TINY if tiny else SHAPES
    runs = {
        "triton": lambda: _train(rank, device, "triton", shapes),
        "torch": lambda: _train(rank, device, "torch", shapes),
        "DDP": lambda: _train_ddp(rank, device),
    }
    found: dict[str, Any] = {"errors": {}}

    def train(name: str) -> None:
        try:
            found[name] = [one.numpy() for one in runs[name]()]
        except Exception:
            found["errors"][name] = traceback.format_exc()

    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=40)
    )
    try:
        found["collectives"] = _collectives(rank, device)
        for name in runs:
            train(name)
    finally:
        dist.destroy_process_group()
    return found


def ranks(part: Part) -> None:
    """Start two processes and judge what they return."""
    with tempfile.TemporaryDirectory() as folder, part.checking("two gloo ranks"):
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(RANKS, mp_context=context) as pool:
            store = str(Path(folder) / "store")
            started = [pool.submit(work, rank, store, part.device.type, part.tiny) for rank in range(RANKS)]
            found = [one.result() for one in started]
        for rank, one in enumerate(found):
            for name, passed, detail in one["collectives"]:
                part.check(f"rank {rank}: {name}", passed, detail)
            for name, text in one["errors"].items():
                part.check(f"rank {rank}: {name}", False, text[-800:])
        for name in ("triton", "torch", "DDP"):
            if all(name in one for one in found):
                alike = all((a == b).all() for a, b in zip(*(one[name] for one in found), strict=True))
                part.check(f"replicas: {name}", alike, f"equal bit for bit after each of {len(found[0][name])} steps")
        if all(name in found[0] for name in ("triton", "torch")):
            pairs = list(zip(found[0]["triton"], found[0]["torch"], strict=True))
            off = [int((abs(a - b) > 2e-6).sum()) for a, b in pairs]
            size, moved = pairs[0][0].size, float(abs(pairs[-1][0] - pairs[0][0]).max())
            detail = f"at most {max(off)} of {size} more than 2e-6 apart in {STEPS} steps that move by {moved:.1e}"
            part.check("trajectory of two ranks", max(off) <= 0.005 * size and moved > 1e-3, detail)
