"""What a run was made on, and its findings as text."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from typing import Any

import numpy
import torch
import triton


def machine(device: torch.device) -> dict[str, Any]:
    """The GPU, its driver, and the versions of everything that takes part."""
    found: dict[str, Any] = {
        "device": device.type, "torch": torch.__version__, "cuda": torch.version.cuda, "triton": triton.__version__,
        "numpy": numpy.__version__, "python": platform.python_version(), "cpus": os.cpu_count(),
    }  # fmt: skip
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "memory": gpu.total_memory,
            "multiprocessors": gpu.multi_processor_count, "l2": gpu.L2_cache_size, "driver": _driver(),
        }  # fmt: skip
    return found


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip()


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Columns of text, numbers to the right."""
    shown = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *shown, strict=True)]
    numeric = [not any(isinstance(row[i], str) for row in rows) for i in range(len(columns))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            c.rjust(width) if right else c.ljust(width) for c, width, right in zip(cells, widths, numeric, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(columns), line(["-" * width for width in widths]), *map(line, shown)])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.3f}" if isinstance(value, float) else str(value)


COMMON = (("ms", "ms"), ("GB/s", "GB/s"), ("of copy", "of_copy"))
TABLES: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("copy", "Copy", (("section", "section"), ("GB/s", "GB/s"))),
    (
        "pass", "Passes over the whole model",
        (
            ("pass", "of"), ("stage", "stage"), ("dtype", "dtype"), ("ranks", "ranks"),
            ("bucket elements", "bucket_elements"), ("launches", "launches"), *COMMON,
        ),
    ),
    (
        "step", "Whole steps",
        (
            ("optimizer", "of"), ("backend", "backend"), ("dtype", "dtype"), ("ranks", "ranks"),
            ("bucket elements", "bucket_elements"), ("block elements", "block_elements"), ("warps", "num_warps"),
            ("mode", "mode"), ("kernels", "launches"), *COMMON,
        ),
    ),
)  # fmt: skip
"""Kind of numbers, title, and pairs of column and key."""


def _shown(entry: dict[str, Any], key: str) -> Any:
    """A value as a table shows it."""
    value = entry.get(key)
    if key == "dtype":
        return str(value).removeprefix("torch.")
    if key == "bucket_elements" and value is not None:
        mebi = 1 << 20
        return "all" if value >= 1 << 40 else f"{value // mebi}Mi" if value % mebi == 0 else value
    return value


def text(results: dict[str, Any]) -> str:
    """The whole report."""
    on = results["machine"]
    blocks = [", ".join(f"{key} {value}" for key, value in on.items())]
    if on["device"] == "cpu":
        blocks.append("On a CPU this only shows that the script works: small sizes, Triton's interpreter, no times.")
    for kind, title, columns in TABLES:
        rows = [[_shown(entry, key) for _, key in columns] for entry in results["numbers"] if entry["kind"] == kind]
        if rows:
            blocks.append(f"{title}\n{table([name for name, _ in columns], rows)}")
    if results["skipped"]:
        lines = [f"  {entry['section']}: {entry['name']}: {entry['why']}" for entry in results["skipped"]]
        blocks.append("\n".join(["Left out", *lines]))
    failed = [entry for entry in results["checks"] if not entry["passed"]]
    lines = [f"  FAILED {entry['section']}: {entry['name']}: {entry['detail']}" for entry in failed]
    blocks.append("\n".join([f"Checks: {len(results['checks']) - len(failed)} passed, {len(failed)} failed", *lines]))
    return "\n\n".join(blocks)
