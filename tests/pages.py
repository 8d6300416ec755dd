"""What the pages show: their fenced blocks, and the commands in them and in the text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
RUNNABLE = [ROOT / "README.md", *DOCS]
"""Pages whose every block is run."""
PAGES = [*RUNNABLE, *(ROOT / name for name in ("CONTRIBUTING.md", "ARCHITECTURE.md", "kernels/README.md"))]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
PROGRAMS = ("make", "pip", "pytest", "python", "python3", "torchrun")


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(text: str, language: str) -> Iterator[tuple[int, str]]:
    """(line of its first line, code) of each fenced block of a language."""
    for found in FENCE.finditer(text):
        if found[1] == language:
            yield text.count("\n", 0, found.start(2)) + 1, found[2]


def shell_lines(text: str) -> Iterator[str]:
    """Lines of blocks without a language or of a console."""
    for language in ("", "console"):
        for _, block in blocks(text, language):
            for line in block.replace("\\\n", " ").splitlines():
                yield line.removeprefix("$ ")


def commands(text: str) -> Iterator[str]:
    """Commands of a page: lines of its shell blocks, and code in the text."""
    yield from shell_lines(text)
    yield from (" ".join(found[1].split()) for found in INLINE.finditer(FENCE.sub("", text)))


def words(command: str) -> list[str]:
    """Words of a command that the tests know, without comment, variables and folders in front; else none."""
    try:
        split = shlex.split(command, comments=True)
    except ValueError:
        return []
    while split and re.fullmatch(r"\w+=.*", split[0]):
        split = split[1:]
    split[:1] = [Path(word).name for word in split[:1]]
    return split if split and split[0] in PROGRAMS else []
