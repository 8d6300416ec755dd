"""`python -m benchmarks.gpu` in its mode for CPUs, which shows that the script itself works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import loopback
from benchmarks.gpu.formulas import FORMULAS
from benchmarks.gpu.part import Part
from benchmarks.gpu.passes import passes
from benchmarks.gpu.tensors import bert_large
from onebit_triton.kernels.backends import PASSES, load_passes
from onebit_triton.kernels.tables import TensorTable

ROOT = Path(__file__).parents[1]
CPU = torch.device("cpu")
NAMES = {name for names in PASSES.values() for name in names}
CASE = "bf16-3-ranks"
"""It clips, so it runs every pass."""


def run(output: Path, *options: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--output", str(output), *options]
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert (output / "report.txt").exists(), done.stderr[-3000:]
    return done.returncode, json.loads((output / "results.json").read_text())


@pytest.mark.slow
def test_correctness_sections_run(tmp_path: Path) -> None:
    """Every pass is run by the kernel in the interpreter, by its twin, and held against its formula."""
    status, found = run(tmp_path, "--sections", f"passes:{CASE}")
    assert status == 0, [check for check in found["checks"] if not check["passed"]]
    checked = {check["name"].removeprefix(f"{CASE}: ") for check in found["checks"]}
    assert checked == NAMES | {"steps", "guards", "parameters"}
    assert found["numbers"] == []
    assert found["machine"]["torch"] == torch.__version__


def test_section_that_does_not_end_is_a_failed_check(tmp_path: Path) -> None:
    status, found = run(tmp_path, "--sections", "steps:trajectories", "--minutes", "0.01")
    assert status == 1
    *passed, last = [(check["name"], check["passed"]) for check in found["checks"]]
    assert last == ("ends", False)
    assert all(good for _, good in passed), "what it may have checked before its time was up"


def tensors_of(arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    """All tensors that a pass is called with, those that tables point at included."""
    tables = [argument.tensors for argument in arguments if isinstance(argument, TensorTable)]
    lists = [[argument for argument in arguments if isinstance(argument, torch.Tensor)], *tables]
    return [tensor for tensors in lists for tensor in tensors if tensor is not None]


def spoil(before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
    """Change one element of what a pass has written."""
    for old, new in zip(before, after, strict=True):
        changed = (old != new).flatten().nonzero().flatten()
        if changed.numel():
            value = new.flatten()[changed[-1]]
            new.view(-1)[changed[-1]] = 1.1 * value + 0.1 if new.is_floating_point() else value + 1
            return


@pytest.mark.parametrize("name", sorted(NAMES))
def test_wrong_pass_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twins in the place of the kernels, one of them wrong in one element: that pass fails, and no other."""

    def sabotaged(backend: str, device: torch.device) -> Any:
        twins = load_passes("torch", device)
        right = getattr(twins, name)

        @torch.no_grad()
        def wrong(*args: Any) -> None:
            before = [tensor.clone() for tensor in tensors_of(args)]
            right(*args)
            spoil(before, tensors_of(args))

        setattr(twins, name, wrong)
        return twins

    monkeypatch.setattr(loopback, "load_passes", sabotaged)
    part = Part("sabotage", tmp_path / "part.json", 60.0, CPU)
    passes(part, CASE)
    failed = {check["name"].removeprefix(f"{CASE}: ") for check in part.found["checks"] if not check["passed"]}
    assert failed & NAMES == {name}


def test_every_pass_that_rounds_has_a_formula() -> None:
    assert set(FORMULAS) == NAMES - {"decide_exchanged", "accept_returned"}


def test_shapes_are_those_of_bert_large() -> None:
    shapes = bert_large()
    assert len(shapes) == 398
    assert sum(torch.Size(shape).numel() for shape in shapes) == 336_226_108
