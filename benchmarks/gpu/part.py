"""What one section of the run finds, written to disk as it is found, so that a section that hangs loses nothing."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch


class Part:
    """Findings of one section.

    Args:
        name: of the section.
        path: JSON file to keep up to date.
        seconds: how long the section may take; it asks `left` and leaves out what no longer fits.
        device: where it runs.
    """

    def __init__(self, name: str, path: Path, seconds: float, device: torch.device) -> None:
        self.name, self.path, self.device = name, path, device
        self._started, self._seconds = time.monotonic(), seconds
        self.found: dict[str, list[dict[str, Any]]] = {"checks": [], "numbers": [], "skipped": []}
        self._write()

    @property
    def tiny(self) -> bool:
        """Whether this is the run on a CPU, which only shows that the script itself works."""
        return self.device.type != "cuda"

    def left(self) -> float:
        """Seconds left."""
        return self._seconds - (time.monotonic() - self._started)

    def say(self, text: str) -> None:
        """Print a line of progress."""
        print(f"[{time.monotonic() - self._started:6.1f} s] {self.name}: {text}", flush=True)

    def check(self, name: str, passed: bool, detail: str) -> None:
        """Record whether something that must hold does."""
        self._add("checks", {"name": name, "passed": bool(passed), "detail": detail})
        self.say(f"{'ok  ' if passed else 'FAIL'} {name}: {detail}")

    def number(self, name: str, **values: Any) -> None:
        """Record something measured."""
        self._add("numbers", {"name": name, **values})
        shown = ", ".join(f"{key} {value:.4g}" for key, value in values.items() if isinstance(value, float))
        self.say(f"{name} {shown}")

    def skip(self, name: str, why: str) -> None:
        """Record what was left out."""
        self._add("skipped", {"name": name, "why": why})
        self.say(f"skipped {name}: {why}")

    @contextmanager
    def checking(self, name: str) -> Iterator[None]:
        """An exception inside is a failed check, and the section goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.check(name, False, f"{type(error).__name__}: {str(error)[:500]}")

    @contextmanager
    def measuring(self, name: str) -> Iterator[None]:
        """An exception inside leaves a measurement out, and the section goes on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.skip(name, f"{type(error).__name__}: {str(error)[:500]}")

    def _add(self, kind: str, entry: dict[str, Any]) -> None:
        self.found[kind].append({"section": self.name, **entry})
        self._write()

    def _write(self) -> None:
        whole = self.path.with_suffix(".new")
        whole.write_text(json.dumps(self.found))
        whole.replace(self.path)
