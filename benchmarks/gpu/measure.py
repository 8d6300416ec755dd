"""Time, launches and bandwidth on a GPU. On a CPU the work is done once, and there is no time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

Run = Callable[[], object]

COPIED_BYTES = 1 << 31


def timed(device: torch.device, run: Run, seconds: float = 0.4) -> dict[str, float]:
    """Milliseconds of a run by CUDA events: median, fastest and slowest of as many as fit into so many seconds.

    The GPU is idle when a run starts, so what the host does before the first launch counts. Nothing flushes the L2:
    what is measured touches a gigabyte or more.
    """
    run()
    if device.type != "cuda":
        return {}
    run()
    times: list[float] = []
    stop = time.monotonic() + seconds
    while len(times) < 5 or (time.monotonic() < stop and len(times) < 200):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return {"ms": statistics.median(times), "ms_fastest": min(times), "ms_slowest": max(times), "runs": len(times)}


def graphed(device: torch.device, run: Run) -> Run:
    """A run as a CUDA graph to replay; everything that it launches must have been launched before."""
    if device.type != "cuda":
        return run
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    return graph.replay


def launches(run: Run) -> int | None:
    """Kernels that a run launches, copies and fills not counted; None where the profiler does not see the GPU."""
    if ProfilerActivity.CUDA not in supported_activities():
        return None
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if event.device_type == DeviceType.CUDA]
    kernels = [e for e in events if not e.name.startswith(("Memcpy", "Memset")) and not e.is_user_annotation]
    return len(kernels) or None


def copy_bandwidth(device: torch.device) -> float | None:
    """GB/s of torch copying one large tensor to another on the GPU, bytes read and bytes written."""
    source, target = torch.randn(2, COPIED_BYTES // 8 if device.type == "cuda" else 64, device=device)
    time_taken = timed(device, lambda: target.copy_(source))
    return 2 * source.nbytes / time_taken["ms"] / 1e6 if time_taken else None


def rates(moved: float, time_taken: dict[str, float], copied: float | None) -> dict[str, Any]:
    """Bytes, and what bandwidth they make, on its own and beside a copy's; nothing where no bytes were counted."""
    if not moved:
        return {}
    if not time_taken or copied is None:
        return {"bytes": moved}
    bandwidth = moved / time_taken["ms"] / 1e6
    return {"bytes": moved, "GB/s": bandwidth, "of_copy": bandwidth / copied}
