"""The benchmarks run, count rightly, and compare with the real thing. No time is asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.counting import count_operations
from benchmarks.replicas import shapes

from .ranks import RankPool

ROOT = Path(__file__).parents[1]


@pytest.mark.distributed
@pytest.mark.slow
def test_tiny_benchmarks_run_and_are_reported(tmp_path: Path) -> None:
    measured, readme, plot = tmp_path / "measured.json", tmp_path / "README.md", tmp_path / "plot.png"
    # DeepSpeed takes long to import, and has a test of its own below.
    command = [sys.executable, "-m", "pytest", "benchmarks", "-q", "-k", "not deepspeed", "-p", "no:cacheprovider"]
    command += ["--benchmark-only", "--size=64k", "--backend=torch", f"--benchmark-json={measured}"]
    command += ["--benchmark-min-rounds=1", "--benchmark-max-time=0.001"]
    # In a worker of pytest-xdist there would be no benchmarks.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-5000:]

    found = {bench["name"]: bench["extra_info"] for bench in json.loads(measured.read_text())["benchmarks"]}
    kinds = {name.partition("[")[0] for name in found}
    assert kinds == {"bench_pass", "bench_step", "bench_exchange"}
    for name, info in found.items():
        assert {"bytes", "device", "threads", "versions", "elements"} <= info.keys(), name
        assert info["bytes"] == 0 or 0 < info["share of copy"] < 10, name
        assert ("bench_exchange" in name) or info["launches"] >= 1, name
    step = found["bench_step[onebit-torch-compression-64k-2]"]
    exchange = found["bench_exchange[64k-onebit]"]
    assert step["wire_bytes"] == exchange["wire_bytes"]
    blocks = sum(-(-torch.Size(shape).numel() // 1024) for shape in shapes("64k"))
    padded = (blocks + blocks % 2) * 1024
    assert step["wire_bytes"] == 2 * (padded // 2 // 8 + 32)
    assert found["bench_exchange[64k-all-reduce-fp32]"]["wire_bytes"] == 4 * padded
    assert found["bench_step[onebit-torch-warmup-64k-2]"]["wire_bytes"] == 0

    readme.write_text("before\n<!-- benchmarks: begin -->\nold\n<!-- benchmarks: end -->\nafter\n")
    report = [sys.executable, "benchmarks/report.py", measured, "--readme", readme, "--plot", plot]
    subprocess.run(report, cwd=ROOT, check=True, timeout=60)
    text = readme.read_text()
    assert text.startswith("before\n<!-- benchmarks: begin -->\n|")
    assert text.endswith("<!-- benchmarks: end -->\nafter\n")
    assert "old" not in text
    assert "| onebit_triton, `torch` | " in text
    assert f"0 / {step['wire_bytes']:,} |" in text
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_report_needs_its_markers(tmp_path: Path) -> None:
    from benchmarks.report import write_table

    readme = tmp_path / "README.md"
    readme.write_text("<!-- benchmarks: end --> <!-- benchmarks: begin -->")
    with pytest.raises(SystemExit, match="must contain"):
        write_table(readme, "text")


@pytest.mark.parametrize(
    ("step", "launches", "tensors_moved"),
    [
        (lambda a, b, out: a.add_(b), 1, 3),
        (lambda a, b, out: torch.add(a, b, out=out), 1, 3),
        (lambda a, b, out: a + b, 1, 3),
        (lambda a, b, out: out.copy_(a), 1, 2),
        (lambda a, b, out: out.zero_(), 1, 1),
        (lambda a, b, out: a.view(-1, 2)[1:].t(), 0, 0),
        (lambda a, b, out: torch._foreach_mul_([a, b], 2.0), 1, 4),
        (lambda a, b, out: a.add_(b[:1].expand(64)), 1, 2 + 1 / 64),
    ],
)
def test_operations_are_counted(step: object, launches: int, tensors_moved: float) -> None:
    tensors = [torch.ones(64) for _ in range(3)]
    count = count_operations(lambda: step(*tensors))  # type: ignore[operator]
    assert (count.launches, count.bytes) == (launches, tensors_moved * 64 * 4)


def replay(rank: int, ranks: int, path: str) -> np.ndarray:
    """Parameters after every step of a recorded run, taken by DeepSpeed's optimizer on one rank."""
    from benchmarks.rivals import deepspeed_onebit_lamb

    run = np.load(path)
    sizes, freeze = run["sizes"].tolist(), int(run["freeze_step"])
    params = [torch.nn.Parameter(piece.clone()) for piece in torch.from_numpy(run["init"]).split(sizes)]
    for param in params:
        param.grad = torch.zeros_like(param)
    names = ("lr", "eps", "weight_decay", "max_coeff", "min_coeff", "coeff_beta")
    names += ("factor_max", "factor_min", "factor_threshold")
    options = {name: float(run[name]) for name in names}
    # Its first call counts as a step.
    optimizer = deepspeed_onebit_lamb(params, "compression", freeze + 1, betas=tuple(run["betas"].tolist()), **options)
    seen = []
    for step, local in enumerate(run["grad"]):
        grad = local.astype(np.float64).mean(0).astype(np.float32) if step < freeze else local[rank]
        for param, piece in zip(params, torch.from_numpy(grad).split(sizes), strict=True):
            param.grad = piece.clone()
        optimizer.step()
        seen.append(torch.cat([param.detach() for param in params]).numpy().copy())
    return np.stack(seen)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("ranks_recorded", [1, 2])
def test_deepspeed_behind_its_stand_ins_replays_a_recorded_run(ranks: RankPool, ranks_recorded: int) -> None:
    pytest.importorskip("deepspeed", reason="deepspeed is not installed: the extra `rivals` has it")
    path = ROOT / "tests" / "data" / f"even_w{ranks_recorded}.npz"
    for params in ranks(ranks_recorded, replay, str(path)):
        np.testing.assert_allclose(params, np.load(path)["param"], rtol=0, atol=1e-7)
