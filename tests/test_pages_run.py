"""Every code block of README and docs runs: Python as it stands, commands on small sizes, diffs by what they leave."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .pages import ROOT, RUNNABLE, blocks, page_id, shell_lines, words
from .recipes import Launcher

NOT_CODE = ("bibtex",)
RECIPE = "--steps=3 --save-every=2 --batch-size=1 --accumulate=1"
SMALL = {
    "examples/demo.py": "--device=cpu --processes=2 --steps=3 --batch-size=2 --lr=1e-4 --eval-sequences=4",
    "examples/train_lm.py": "--device=cpu --steps=3 --freeze-step=2 --width=32 --batch-size=1 --eval-sequences=4",
    "examples/freeze_step.py": "--steps=2 --freeze-steps 1 --beta2 0.9 --width=32 --batch-size=2 --eval-sequences=4",
    "examples/accelerate_lm.py": f"{RECIPE} --freeze-step=1",
    "examples/lightning_fabric_lm.py": f"{RECIPE} --freeze-step=1",
    "examples/lightning_trainer_lm.py": f"{RECIPE} --freeze-step=1",
    "examples/transformers_bert.py": f"{RECIPE} --eval-windows=8",
    "examples/resume.py": "--save-at=4 --freeze-step=2 --more=2 --width=32 --seeds=1",
}
"""Options that are added to a command, so that it takes seconds."""
SHORTENED = ("step-100", "step-2"), ("step=100", "step=2"), ("checkpoint-100", "checkpoint-2")
GROUP = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from onebit_triton import OneBitLamb
dist.init_process_group("gloo", init_method="file://{folder}/store", rank=0, world_size=1)
model = torch.nn.Linear(4, 2)
before = model.weight.detach().clone()
"""
AROUND = {
    "docs/trainers.md": (
        """
import torch
from accelerate import Accelerator
from onebit_triton import OneBitLamb
accelerator = Accelerator(cpu=True)
class Model(torch.nn.Linear):
    def forward(self, tokens, targets):
        return torch.nn.functional.mse_loss(super().forward(tokens), targets)
model, folder = Model(4, 2), "{folder}/saved"
tokens, targets = torch.ones(3, 4), torch.zeros(3, 2)
scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters()))
before = model.weight.detach().clone()
OneBitLamb.attach = lambda optimizer, model: model  # one process has no DDP model to attach
""",
        """
import os
assert (model.weight != before).any()
assert "optimizer.bin" in os.listdir(folder)
""",
    ),
    "README.md": (
        GROUP,
        """
model(torch.ones(3, 4)).sum().backward()
optimizer.step()
assert (model.module.weight != before).any()
dist.destroy_process_group()
""",
    ),
    "docs/from-deepspeed.md": (
        GROUP
        + """
import json
from onebit_triton.deepspeed import arguments_from_deepspeed
block = {"optimizer": {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 3}}}
json.dump(block, open("ds.json", "w"))
criterion, loader = torch.nn.MSELoss(), [(torch.ones(3, 4), torch.zeros(3, 2))] * 4
scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(model.parameters()))
first = criterion(model(loader[0][0]), loader[0][1]).item()
""",
        """
assert optimizer.stage == "compression"
assert criterion(model(inputs), targets) < first
dist.destroy_process_group()
""",
    ),
}
"""What stands around the diffs of a page: names that they use, and what must hold afterwards."""


def environment() -> dict[str, str]:
    """Without what an outer make or torchrun has set."""
    theirs = ("RANK", "WORLD_SIZE", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")
    kept = {key: value for key, value in os.environ.items() if key not in theirs}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=250)


def run_python(page: str, parts: list[tuple[int, str]]) -> None:
    """Run Python code in one namespace; each part stands at a line of a page."""
    namespace = {"__name__": "__main__"}
    for line, code in parts:
        exec(compile("\n" * (line - 1) + code, page, "exec"), namespace)
    assert not torch.distributed.is_initialized()


def after(diff: str) -> str:
    """What a diff leaves."""
    return "".join(line[1:] or line for line in diff.splitlines(keepends=True) if not line.startswith("-"))


def run_command(command: str, folder: Path, launch: Launcher) -> None:
    """Run a command of a page as it stands, but small, in a folder or on a copy of the sources.

    Raises:
        AssertionError: if it fails, or if this function does not know how to run it.
    """
    for long, short in SHORTENED:
        command = command.replace(long, short)
    make = ["make", f"VENV={sys.prefix}"]  # what the test runs in has been installed
    match words(command):
        case ["torchrun", "--nproc-per-node", ranks, script, *options]:
            launch(ROOT / script, *options, *SMALL[script].split(), ranks=int(ranks), folder=folder)
            return
        case ["python", "-m", *arguments]:
            ran = [sys.executable, "-m", *arguments]
        case ["python", script, *options] if script in SMALL:
            launch.trainings_of(ROOT / script, *options, *SMALL[script].split(), folder=folder)
            return
        case ["make", "demo"]:
            arguments = f"DEMO_ARGS={SMALL['examples/demo.py']} --out={folder / 'demo'}"
            ran = [*make, "-C", str(ROOT), "-o", f"{sys.prefix}/.installed-demo", "demo", arguments]
        case ["make", "test"]:
            ran = [*make, "-C", str(ROOT), "-o", f"{sys.prefix}/.installed-test", "test", "WORKERS=0"]
            ran += ["PYTEST_ARGS=tests/test_buckets.py"]
        case ["pip", "install", *what]:
            sources = folder / "sources"
            shutil.copytree(ROOT, sources, ignore=shutil.ignore_patterns(".*", "out", "build"), dirs_exist_ok=True)
            ran = [sys.executable, "-m", "pip", "install", *what, "--no-build-isolation"]
            # What the test runs in must stay as it is.
            ran += ["--no-deps", f"--target={folder / 'installed'}"] if what == ["."] else ["--dry-run"]
            folder = sources
        case _:
            raise AssertionError(f"unknown command {command!r}")
    done = run(ran, folder)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE, ids=page_id)
def test_page_runs(page: Path, tmp_path: Path, launch: Launcher) -> None:
    """In the page's order, but Python first; all of it in one folder."""
    text, name = page.read_text(), page_id(page)
    python, diffs = list(blocks(text, "python")), list(blocks(text, "diff"))
    if python:
        launch.fork(run_python, [(name, python)], tmp_path)
    if diffs:
        before, then = AROUND[name]
        parts = [(1, before.replace("{folder}", str(tmp_path))), *((at, after(diff)) for at, diff in diffs), (1, then)]
        launch.fork(run_python, [(name, parts)], tmp_path)
    for line in shell_lines(text):
        if line.strip():
            run_command(line, tmp_path, launch)


@pytest.mark.parametrize("page", RUNNABLE, ids=page_id)
def test_no_block_is_left_out(page: Path) -> None:
    languages = set(re.findall(r"^```(\w+)$", page.read_text(), re.MULTILINE))
    assert languages <= {"python", "diff", "console", *NOT_CODE}


def test_python_that_fails_is_found(tmp_path: Path, launch: Launcher) -> None:
    text = "# A page\n\n```python\nx = 1\n```\n\nand\n\n```python\ny = x\nz = nowhere\n```\n"
    with pytest.raises(AssertionError, match="name 'nowhere' is not defined") as raised:
        launch.fork(run_python, [("page.md", list(blocks(text, "python")))], tmp_path)
    assert 'File "page.md", line 11' in str(raised.value)


def test_a_command_that_fails_is_found(tmp_path: Path, launch: Launcher) -> None:
    with pytest.raises(AssertionError, match="--ranks"):
        run_command("python -m onebit_triton.estimate --parameters 1e6 --ranks none", tmp_path, launch)
    with pytest.raises(AssertionError, match="unknown command"):
        run_command("ls -l", tmp_path, launch)


def test_what_a_diff_leaves() -> None:
    assert after("-old\n+new\n same\n\n") == "new\nsame\n\n"
