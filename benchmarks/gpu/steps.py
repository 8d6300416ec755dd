"""Whole steps of one process: both backends' trajectories, what a steady step may not do, CUDA graphs, collectives."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from onebit_triton import OneBitLamb

from .foreach_lamb import ForeachLamb
from .loopback import GroupOfOne, Loopback, one_rank_of
from .part import Part
from .passes import same_bits
from .tensors import AWKWARD, TINY, Guarded, gradients, model, two_groups

STAGES = ("warmup", "compression")
STEADY = 5
"""Steps after which each stage, where compression follows after two, is in its steady state."""

MORE = 4
"""Steps that runs take side by side from there."""

TOLERANCE = {torch.float32: (2e-6, 0.0), torch.bfloat16: (1e-6, 2**-6)}
"""Absolute and relative difference of parameters between backends: sums are rounded differently, and then p is."""


def vector(params: list[Any]) -> Tensor:
    """All parameters as one fp32 vector on the host."""
    return torch.cat([param.detach().reshape(-1).float().cpu() for param in params])


def in_stage(stage: str, ranks: int, params: list[Any], **options: Any) -> OneBitLamb:
    """An optimizer in the steady state of a stage, of one rank of so many."""
    optimizer = one_rank_of(ranks, params, freeze_step=2 if stage == "compression" else 10**9, **options)
    for _ in range(STEADY):
        optimizer.step()
    return optimizer


def trajectory(part: Part, backend: str, dtype: torch.dtype) -> list[Tensor]:
    """Parameters after each step of a run through both stages and back, with a skipped step in each."""
    guarded = Guarded(TINY if part.tiny else AWKWARD, dtype, part.device, shift=1)
    optimizer = OneBitLamb(
        two_groups(guarded.params), lr=0.01, freeze_step=4, bias_correction=True, max_grad_norm=0.5, backend=backend,
        bucket_elements=4096, block_elements=64,
    )  # fmt: skip
    found = []
    for step in range(16):
        guarded.set_gradients(step)
        if step in (2, 8):
            guarded.grads[0].view(-1)[3] = float("inf")
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        if step == 12:
            optimizer.rewarm(2)
        optimizer.step()
        found.append(vector(guarded.params))
    return found


def check_trajectories(part: Part) -> None:
    """The Triton kernels and plain torch train alike."""
    for dtype, (atol, rtol) in TOLERANCE.items():
        with part.checking(f"trajectory {dtype}"):
            runs = [trajectory(part, backend, dtype) for backend in ("triton", "torch")]
            a, b = map(torch.stack, runs)
            apart = float(((a - b).abs() - rtol * b.abs()).clamp(min=0).max())
            moved = float((a[-1] - a[0]).abs().max())
            detail = f"at most {apart:.1e} apart in {len(a)} steps that move by {moved:.1e}"
            part.check(f"trajectory {dtype}", apart <= atol and moved > 100 * atol, detail)


def check_rival(part: Part) -> None:
    """The eager LAMB that speed is compared with computes LAMB."""
    mine, theirs = (model(TINY, torch.float32, part.device) for _ in range(2))
    options = {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-6}
    ours = OneBitLamb(mine, freeze_step=10, backend="torch", **options)
    rival = ForeachLamb(theirs, **options)
    for step in range(4):
        for params in (mine, theirs):
            for param, value in zip(params, gradients(step, 0, params), strict=True):
                param.grad.copy_(value)
        ours.step()
        rival.step()
    worst = float((vector(mine) - vector(theirs)).abs().max())
    part.check("foreach LAMB", worst <= 1e-6, f"at most {worst:.1e} from OneBitLamb's warmup")


@contextmanager
def synchronising_is_an_error() -> Iterator[None]:
    """Every call that waits for the GPU raises."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check_steady(part: Part, stage: str, ranks: int, **options: Any) -> None:
    """A steady step waits for nothing and allocates nothing; new gradients and rates cost no waiting either."""
    params = model(AWKWARD, torch.float32, part.device)
    optimizer = in_stage(stage, ranks, params, bucket_elements=4096, **options)
    name = describe(stage, ranks, options)
    with part.checking(f"no synchronisation: {name}"):
        with synchronising_is_an_error():
            for step in range(3):
                for param in params:
                    param.grad = param.grad.clone()
                for group in optimizer.param_groups:
                    group["lr"] = 0.001 * (step + 1)
                optimizer.step()
        part.check(f"no synchronisation: {name}", True, "3 steps with new gradients and new rates")
    with part.checking(f"no allocation: {name}"):
        optimizer.step()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(3):
            optimizer.step()
        count = torch.cuda.memory_stats()["allocation.all.allocated"] - before
        part.check(f"no allocation: {name}", count == 0, f"{count} allocations in 3 steps")


def check_graph(part: Part, stage: str, ranks: int, **options: Any) -> None:
    """A captured step, replayed with other gradients and rates, is the step that eager execution takes, bit for bit."""
    runs = []
    for _ in range(2):
        params = model(AWKWARD, torch.float32, part.device)
        rate = torch.tensor(0.01, device=part.device)
        runs.append((params, rate, in_stage(stage, ranks, params, lr=rate, bucket_elements=4096, **options)))
    eager, replayed = (optimizer for _, _, optimizer in runs)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    # The watchdog of a process group polls events from another thread.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        replayed.step()
    take_steps(runs, (eager.step, graph.replay))
    torch.cuda.synchronize()
    counted = [optimizer.metrics()["step"] for optimizer in (eager, replayed)]
    same, total = equal_tensors(runs)
    part.check(
        f"graph: {describe(stage, ranks, options)}", same == total and counted == [STEADY + MORE] * 2,
        f"{same} of {total} tensors equal bit for bit after {MORE} replays; steps, eager and replayed: {counted}",
    )  # fmt: skip


def check_group(part: Part, stage: str, ranks: int) -> None:
    """Steps through a process group's collectives are the steps through plain copies, bit for bit."""
    runs = []
    for communicator in (Loopback, GroupOfOne):
        params = model(TINY if part.tiny else AWKWARD, torch.float32, part.device)
        rate = torch.tensor(0.01, device=part.device)
        layout = {"block_elements": 64, "bucket_elements": 512}
        runs.append((params, rate, in_stage(stage, ranks, params, lr=rate, communicator=communicator, **layout)))
    take_steps(runs, [optimizer.step for _, _, optimizer in runs])
    same, total = equal_tensors(runs)
    part.check(
        f"process group: {stage}, {ranks} ranks", same == total, f"{same} of {total} parameters and states equal"
    )


def take_steps(runs: Sequence[Any], steps: Sequence[Callable[[], object]]) -> None:
    """Let runs take as many steps more, with the same new gradients and rates, filled in place."""
    for number in range(MORE):
        for (params, rate, _), step in zip(runs, steps, strict=True):
            rate.fill_(0.01 / (1 + number))
            for param, value in zip(params, gradients(number, 0, params), strict=True):
                param.grad.copy_(value)
            step()


def equal_tensors(runs: Sequence[Any]) -> tuple[int, int]:
    """How many parameters and states of two runs are equal bit for bit, and how many there are."""
    pairs = list(zip(*(params for params, _, _ in runs), strict=True))
    states = [optimizer.state_dict()["state"] for _, _, optimizer in runs]
    for number, entry in states[0].items():
        pairs += [(value, states[1][number][key]) for key, value in entry.items()]
    return sum(same_bits(a.detach(), b.detach()) for a, b in pairs), len(pairs)


def describe(stage: str, ranks: int, options: dict[str, Any]) -> str:
    """A setting in words."""
    collectives = ", process group" if "communicator" in options else ""
    return f"{stage}, {ranks} ranks{', clipping' if 'max_grad_norm' in options else ''}{collectives}"


def check_collectives(part: Part) -> None:
    """Everything once more, with the asynchronous collectives of a process group (NCCL on a GPU) between the passes."""
    ranks = 4
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "gloo" if part.tiny else "nccl"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            for stage in STAGES:
                with part.checking(f"process group: {stage}"):
                    check_group(part, stage, ranks)
                if not part.tiny:
                    with part.checking(f"steady steps: {stage}, process group"):
                        check_steady(part, stage, ranks, communicator=GroupOfOne)
                    with part.checking(f"graph: {stage}, process group"):
                        check_graph(part, stage, ranks, communicator=GroupOfOne)
        finally:
            dist.destroy_process_group()


def steps(part: Part, only: str) -> None:
    """One kind of the checks of this file."""
    if only == "trajectories":
        check_trajectories(part)
        with part.checking("foreach LAMB"):
            check_rival(part)
    elif only == "collectives":
        check_collectives(part)
    elif part.tiny:
        part.skip(only, "it needs CUDA")
    else:
        for stage in STAGES:
            if only == "graphs":
                for ranks in (1, 4):
                    with part.checking(f"graph: {stage}, {ranks} ranks"):
                        check_graph(part, stage, ranks)
            else:
                for ranks, options in ((1, {}), (1, {"max_grad_norm": 1.0}), (4, {}), (4, {"max_grad_norm": 1.0})):
                    with part.checking(f"steady steps: {stage}, {ranks} ranks"):
                        check_steady(part, stage, ranks, **options)
