"""How fast passes and whole steps are at BERT-Large's shapes, beside a copy and beside other optimizers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

from onebit_triton import OneBitLamb
from onebit_triton.kernels.backends import BACKENDS, PASSES
from onebit_triton.kernels.budgets import declared, step_bytes

from .foreach_lamb import ForeachLamb
from .loopback import one_rank_of, wrapped_passes
from .measure import copy_bandwidth, graphed, launches, rates, timed
from .part import Part
from .steps import STAGES
from .tensors import TINY, bert_large, model

DTYPES = (torch.float32, torch.bfloat16)


@dataclass(frozen=True)
class Scale:
    """Sizes to measure at."""

    shapes: tuple[tuple[int, ...], ...]
    bucket: int
    buckets: tuple[int, ...]
    block: int
    blocks: tuple[int, ...]
    everything: int

    @property
    def layout(self) -> dict[str, int]:
        """Options of the optimizer that are not swept."""
        return {"bucket_elements": self.bucket, "block_elements": self.block}


def scale_of(part: Part) -> Scale:
    """BERT-Large on a GPU, a handful of small tensors on a CPU."""
    if part.tiny:
        return Scale(TINY, 512, (256, 512), 64, (64, 128), 1 << 20)
    mebi = 1 << 20
    buckets = tuple(n * mebi for n in (1, 2, 4, 8, 16, 32))
    return Scale(tuple(bert_large()), 4 * mebi, buckets, 1024, (1024, 2048, 4096), 1 << 40)


def steady(stage: str, ranks: int, params: list[Any], scale: Scale, **options: Any) -> OneBitLamb:
    """An optimizer in the steady state of a stage, of one rank of so many; its rate is 0, so that it can go on."""
    freeze_step = 2 if stage == "compression" else 10**9
    optimizer = one_rank_of(ranks, params, lr=0.0, freeze_step=freeze_step, **{**scale.layout, **options})
    for _ in range(4 if stage == "compression" else 2):
        optimizer.step()
    return optimizer


class Recorder:
    """The Triton passes, which also note how they are called, so that each can be called again on its own."""

    def __init__(self, device: torch.device) -> None:
        self.calls: dict[str, list[Callable[[], None]]] = defaultdict(list)
        self.passes = wrapped_passes(device, lambda name, kernel: partial(self._call, name, kernel))

    def _call(self, name: str, run: Callable[..., None], *args: Any) -> None:
        run(*args)
        self.calls[name].append(partial(run, *args))


def measure_passes(part: Part, dtype: torch.dtype, ranks: int, bucket: int, copied: float | None) -> None:
    """Every pass of both stages over the whole model, replayed as a graph of its launches over all buckets."""
    scale, size = scale_of(part), dtype.itemsize
    params = model(scale.shapes, dtype, part.device)
    momentum = "uncompressed" if ranks == 1 else "bits"
    for stage in STAGES:
        recorder = Recorder(part.device)
        optimizer = steady(stage, ranks, params, scale, passes=recorder.passes, bucket_elements=bucket)
        recorder.calls.clear()
        optimizer.step()
        elements = optimizer.metrics()["padded_elements"]
        for name, calls in recorder.calls.items():
            if stage == "warmup" and ranks > 1 and name != "flatten_gradients":
                continue  # the same as on one rank

            def run(calls: list[Callable[[], None]] = calls) -> None:
                for call in calls:
                    call()

            moved = declared(name, ranks, size, size, momentum).total(elements, scale.block)
            time_taken = timed(part.device, graphed(part.device, run), 0.15)
            part.number(
                f"{name}, {stage}, {dtype}, {ranks} ranks", kind="pass", of=name, dtype=str(dtype), stage=stage,
                ranks=ranks, bucket_elements=bucket, launches=len(calls), **time_taken,
                **rates(moved, time_taken, copied),
            )  # fmt: skip


def measure_copy(part: Part) -> float | None:
    """What everything is compared with: GB/s of a copy, in this process, before the rest."""
    copied = copy_bandwidth(part.device)
    if copied:
        part.number("copy", kind="copy", **{"GB/s": copied})
    return copied


def passes_speed(part: Part) -> None:
    """Passes with the whole model in one bucket, where a launch is a whole pass, and at the default bucket size."""
    scale, copied = scale_of(part), measure_copy(part)
    for bucket in (scale.everything, scale.bucket):
        for dtype in DTYPES:
            for ranks in (1, 8):
                name = f"passes, {dtype}, {ranks} ranks, buckets of {bucket}"
                if part.left() < 6:
                    part.skip(name, "no time left")
                    continue
                with part.measuring(name):
                    measure_passes(part, dtype, ranks, bucket, copied)


def measure_step(
    part: Part,
    name: str,
    run: Callable[[], object],
    moved: float,
    copied: float | None,
    graph: bool = True,
    **facts: Any,
) -> None:
    """A whole step as the host launches it, and replayed as a graph."""
    eager = timed(part.device, run)
    facts |= {"kind": "step", "launches": None if part.tiny else launches(run)}
    part.number(f"{name}, eager", mode="eager", **facts, **eager, **rates(moved, eager, copied))
    if graph:
        replayed = timed(part.device, graphed(part.device, run))
        part.number(f"{name}, graph", mode="graph", **facts, **replayed, **rates(moved, replayed, copied))


def measure_ours(
    part: Part, params: list[Any], stage: str, ranks: int, copied: float | None, backend: str = "triton",
    num_warps: int = 0, **options: int,
) -> None:  # fmt: skip
    """A whole step of OneBitLamb; num_warps 0 is what block_elements gives."""
    scale, dtype = scale_of(part), params[0].dtype
    layout = {**scale.layout, **options}
    passes = "uncompressed" if ranks == 1 and stage == "compression" else stage
    per_element = step_bytes(passes, ranks, dtype.itemsize, dtype.itemsize, layout["block_elements"])
    with warps(num_warps) if num_warps else nullcontext():
        started = time.monotonic()
        optimizer = steady(stage, ranks, params, scale, backend=backend, **options)
        moved = per_element * optimizer.metrics()["padded_elements"]  # waits, so that the time is that of the steps
        first_steps = None if part.tiny else time.monotonic() - started
        measure_step(
            part, f"{backend}, {stage}, {dtype}, {ranks} ranks, {layout}, {num_warps or 'default'} warps",
            optimizer.step, moved, copied, graph=backend == "triton", of=f"onebit_triton {stage}", backend=backend,
            stage=stage, ranks=ranks, dtype=str(dtype), num_warps=num_warps or None, first_steps_s=first_steps,
            **layout,
        )  # fmt: skip


def steps_speed(part: Part) -> None:
    """Whole steps: ours in both stages and at several numbers of ranks, and others' on the same tensors."""
    scale, copied = scale_of(part), measure_copy(part)
    for dtype in DTYPES:
        params = model(scale.shapes, dtype, part.device)
        elements = sum(param.numel() for param in params)

        def ours(stage: str, ranks: int, params: list[Any] = params) -> None:
            measure_ours(part, params, stage, ranks, copied)

        def rival(name: str, params: list[Any] = params, elements: int = elements) -> None:
            size = params[0].dtype.itemsize
            if name == "AdamW fused":
                adamw = torch.optim.AdamW(params, lr=0.0, fused=True, capturable=not part.tiny)
                run, moved = adamw.step, 7.0 * size * elements
            else:
                run, moved = ForeachLamb(params, lr=0.0).step, 0.0
            measure_step(part, f"{name}, {params[0].dtype}", run, moved, copied, of=name, dtype=str(params[0].dtype))

        todo = [
            *(partial(ours, stage, 1) for stage in STAGES),
            *(partial(rival, name) for name in ("AdamW fused", "LAMB foreach")),
            *(partial(ours, "compression", ranks) for ranks in (2, 4, 8)),
        ]
        for measure in todo:
            name = f"whole step, {dtype}, {', '.join(map(str, measure.args))}"
            if part.left() < 4:
                part.skip(name, "no time left")
                continue
            with part.measuring(name):
                measure()


def compiled_speed(part: Part) -> None:
    """The twins compiled by torch.compile, one rank, fp32: compiling them is what takes the time."""
    if "inductor" not in BACKENDS:
        part.skip("compiled twins", "there is no backend 'inductor'")
        return
    scale, copied = scale_of(part), measure_copy(part)
    params = model(scale.shapes, torch.float32, part.device)
    for stage in STAGES:
        with part.measuring(f"compiled twins, {stage}"):
            measure_ours(part, params, stage, 1, copied, backend="inductor")


@contextmanager
def warps(number: int) -> Iterator[None]:
    """Launch the passes over blocks with so many warps instead of what block_elements gives."""
    with ExitStack() as stack:
        for name in PASSES:
            module = import_module(f"onebit_triton.kernels.{name}")
            if hasattr(module, "launch_constants"):
                constants = {"num_warps": number, "enable_fp_fusion": False}
                stack.enter_context(patch.object(module, "launch_constants", lambda block, found=constants: found))
        yield


def sweep(part: Part) -> None:
    """Whole steps at other bucket sizes, block sizes and numbers of warps, to choose the defaults by."""
    scale, copied = scale_of(part), measure_copy(part)
    params = model(scale.shapes, torch.float32, part.device)
    settings = [{"bucket_elements": bucket} for bucket in scale.buckets]
    settings += [{"block_elements": block} for block in scale.blocks if block != scale.block]
    settings += [
        {"block_elements": block, "num_warps": number} for block, number in zip(scale.blocks, (2, 4, 8), strict=False)
    ]
    for setting in settings:
        for stage, ranks in (("warmup", 1), ("compression", 4)):
            name = f"{stage}, {ranks} ranks, {setting}"
            if part.left() < 5:
                part.skip(name, "no time left")
                continue
            with part.measuring(name):
                measure_ours(part, params, stage, ranks, copied, **setting)
