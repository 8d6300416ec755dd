"""The commands that the pages name exist, and take the options that they are given."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import runpy
import shlex
import sys
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from .pages import PAGES, ROOT, commands, page_id, words

OURS = ("onebit_triton", "benchmarks", "tests")


def problems(command: str) -> Iterator[str]:
    """What a command names that does not exist."""
    match words(command):
        case ["make", *targets]:
            yield from make_problems(targets)
        case ["pip", *arguments]:
            yield from extra_problems(arguments)
        case ["pytest", *arguments]:
            yield from path_problems(arguments)
        case ["torchrun", *arguments]:
            at = next((i for i, word in enumerate(arguments) if word.endswith(".py")), len(arguments))
            yield from option_problems("torch.distributed.run", arguments[:at])
            for script in arguments[at : at + 1]:
                yield from script_problems(script, arguments[at + 1 :])
        case ["python" | "python3", "-m", module, *options]:
            if not importable(module):
                yield f"no module {module}"
            elif module.split(".")[0] in OURS:
                yield from option_problems(module, options)
        case ["python" | "python3", script, *options] if script.endswith(".py"):
            yield from script_problems(script, options)


def importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def make_problems(arguments: list[str]) -> Iterator[str]:
    makefile = (ROOT / "Makefile").read_text()
    for word in arguments:
        name, given, value = word.partition("=")
        pattern = rf"^{name} [:?]?=" if given else rf"^{name}:"
        if not re.search(pattern, makefile, re.MULTILINE):
            yield f"no {'variable' if given else 'target'} {name}"
        if name == "PYTEST_ARGS":
            yield from path_problems(shlex.split(value))


def path_problems(arguments: list[str]) -> Iterator[str]:
    yield from (f"no file {word}" for word in arguments if "/" in word and not (ROOT / word.split("::")[0]).exists())


def extra_problems(arguments: list[str]) -> Iterator[str]:
    section = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    for word in arguments:
        for extra in re.findall(r"^(?:\.|onebit-triton)\[(.*)\]$", word):
            yield from (f"no extra {one}" for one in extra.split(",") if not re.search(rf"(?m)^{one} =", section))


def script_problems(script: str, options: list[str]) -> Iterator[str]:
    if (ROOT / script).exists():
        yield from option_problems(script, options)
    else:
        yield f"no file {script}"


def option_problems(program: str, options: list[str]) -> Iterator[str]:
    for option in options:
        name = option.split("=")[0]
        if name.startswith("--") and not re.search(rf"{re.escape(name)}(?![\w-])", usage(program)):
            yield f"{program} has no option {name}"


@cache
def usage(program: str) -> str:
    """What a module or script says to --help."""
    said, path, status = io.StringIO(), sys.path.copy(), None
    with contextlib.redirect_stdout(said), warnings.catch_warnings(), mock.patch.object(sys, "argv", [program, "-h"]):
        warnings.simplefilter("ignore")  # of modules that have been imported already
        try:
            if program.endswith(".py"):
                sys.path.insert(0, str((ROOT / program).parent))
                runpy.run_path(str(ROOT / program), run_name="__main__")
            else:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            status = ended.code
        finally:
            sys.path[:] = path
    assert status in (None, 0), f"{program} --help fails"
    return said.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_commands_of_a_page_exist(page: Path) -> None:
    found = {command: list(problems(command)) for command in commands(page.read_text())}
    assert {command: what for command, what in found.items() if what} == {}


def test_commands_are_found() -> None:
    """What this test is for: the commands of the pages that are there today."""
    readme = [command for command in commands((ROOT / "README.md").read_text()) if words(command)]
    assert any(command.startswith("python -m onebit_triton.estimate") for command in readme)
    assert any(command.startswith("make demo") for command in readme)
    assert "python -m benchmarks.network --steps 160" in readme
    contributing = [command for command in commands((ROOT / "CONTRIBUTING.md").read_text()) if words(command)]
    assert "python -m tests.aot.compile_kernels --write" in contributing


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        ("make tests", "no target tests"),
        ("make test PYTEST_ARG=x", "no variable PYTEST_ARG"),
        ("make test PYTEST_ARGS='tests/nowhere'", "no file tests/nowhere"),
        ("$ python -m onebit_triton.nowhere run.jsonl", "no module onebit_triton.nowhere"),
        ("python -m onebit_triton.estimate --rank 3", "onebit_triton.estimate has no option --rank"),
        ("python -m onebit_triton.estimate --ranks 3", None),
        ("python examples/nowhere.py", "no file examples/nowhere.py"),
        ("OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/train_lm.py --speps=3  # trains",
         "examples/train_lm.py has no option --speps"),
        ("torchrun --nproc-per-rank 2 examples/train_lm.py", "torch.distributed.run has no option --nproc-per-rank"),
        ("torchrun --nproc-per-node 2 examples/train_lm.py --steps 9", None),
        (".venv/bin/pip install -e '.[tests]'", "no extra tests"),
        ("pip install 'onebit-triton[report,demo]'", None),
        ("bucket  | segment 0        | don't |", None),
    ],
)  # fmt: skip
def test_a_command_that_rotted_is_found(command: str, problem: str | None) -> None:
    (shown,) = commands(f"# A page\n\n```\n{command}\n```\n")
    assert list(problems(shown)) == ([] if problem is None else [problem])


def test_the_tests_that_the_readme_names_exist() -> None:
    section = (ROOT / "README.md").read_text().split("\n## What happens when ...\n")[1].split("\n## ")[0]
    rows = [row for row in section.splitlines() if row.startswith("| ")][1:]
    named = [re.findall(r"`(test_\w+)` \|$", row) for row in rows]
    assert len(rows) > 30
    assert all(len(names) == 1 for names in named), "a test for every line"
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    defined = re.findall(r"^def (test_\w+)", sources, re.MULTILINE)
    assert [name for (name,) in named if defined.count(name) != 1] == []
