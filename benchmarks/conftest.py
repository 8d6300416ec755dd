"""Options of the benchmarks, and what is recorded with every time.

`pytest benchmarks/ --benchmark-only`, with `--size` and `--backend` (again and again) to choose. No time is asserted.
"""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
import time
from typing import Any, Protocol

import pytest
import torch
from cpuinfo import get_cpu_info  # a dependency of pytest-benchmark

from .replicas import BACKENDS, DEVICE, SIZES, wait

DEFAULT_SIZES = ["8M"]

COPIED = 64 * 2**20
"""Bytes of the tensor that is copied to measure the memory's bandwidth."""

PACKAGES = ("torch", "triton", "onebit_triton", "deepspeed", "pytorch_optimizer")


class Record(Protocol):
    """Writes what a benchmark moved, and any other facts, to its `extra_info`."""

    def __call__(self, moved: float, **facts: Any) -> None:
        """Take the bytes that one call moves."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("onebit_triton")
    group.addoption("--size", action="append", choices=list(SIZES), help=f"default: {', '.join(DEFAULT_SIZES)}")
    group.addoption("--backend", action="append", choices=["torch", *BACKENDS], help=f"default: {', '.join(BACKENDS)}")


def pytest_configure(config: pytest.Config) -> None:
    # An appending option adds to its default, so the default is filled in here.
    config.option.size = config.option.size or DEFAULT_SIZES
    config.option.backend = config.option.backend or BACKENDS
    torch.set_num_threads(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name in ("size", "backend"):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, metafunc.config.getoption(name), scope="module")


@pytest.fixture(scope="session")
def versions() -> dict[str, str]:
    """What ran: packages, Python, and the names of the CPU and the GPU."""
    found = {"python": platform.python_version(), "cpu": get_cpu_info()["brand_raw"]}
    if DEVICE.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    installed = {d.name.replace("-", "_"): d.version for d in importlib.metadata.distributions()}
    return found | {name: installed[name] for name in PACKAGES if name in installed}


@pytest.fixture(scope="session")
def copy_bandwidth() -> float:
    """Bytes a second, read and written, of `copy_` between tensors of 64 MiB."""
    source = torch.ones(COPIED // 4, device=DEVICE)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(25):
        wait()
        start = time.perf_counter()
        target.copy_(source)
        wait()
        seconds.append(time.perf_counter() - start)
    return 2 * COPIED / statistics.median(seconds[5:])


@pytest.fixture
def record(benchmark: Any, versions: dict[str, str], copy_bandwidth: float) -> Record:
    """Writes to `extra_info`: bytes, GB/s, that as a share of a copy's, and what ran where."""

    def write(moved: float, **facts: Any) -> None:
        info = {"device": DEVICE.type, "threads": torch.get_num_threads(), "bytes": moved, **facts}
        if benchmark.stats is not None and moved:
            rate = moved / benchmark.stats.stats.median
            info |= {"GB/s": rate / 1e9, "copy GB/s": copy_bandwidth / 1e9, "share of copy": rate / copy_bandwidth}
        benchmark.extra_info.update(info, versions=versions)

    return write


def pytest_benchmark_update_json(output_json: dict[str, Any]) -> None:
    """Keep what a report needs, and the names of machines and branches out of it."""
    machine, commit = output_json["machine_info"], output_json["commit_info"]
    output_json["machine_info"] = {"cpu": machine["cpu"]["brand_raw"], "cores": machine["cpu"]["count"]}
    output_json["commit_info"] = {"id": commit["id"], "dirty": commit["dirty"]}
    for bench in output_json["benchmarks"]:
        bench["stats"].pop("data", None)
        for facts in (bench["stats"], bench["extra_info"]):
            facts |= {key: float(f"{value:.5g}") for key, value in facts.items() if isinstance(value, float)}
