"""Run all sections, each in a process of its own, so that one that fails or hangs does not take the others along.

Correctness comes first, sections side by side; then speed, one after the other, for as long as there is time.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]

CORRECTNESS = (
    *(f"passes:{case}" for case in (
        "fp32", "fp32-4-ranks", "fp32-misaligned-2-ranks", "bf16-3-ranks", "bf16-8-ranks", "fp16-5-ranks"
    )),
    "steps:trajectories", "steps:steady", "steps:graphs", "steps:collectives", "ranks",
)  # fmt: skip
CORRECTNESS_SHARE = 0.4
"""Of the time, how much correctness may take on a GPU."""

SPEED = {"speed-passes": 75.0, "speed-steps": 75.0, "speed-sweep": 60.0, "speed-compiled": 60.0}
"""Section -> seconds that it may take at most."""

GRACE = 5.0
"""Seconds between the moment at which a section should end by itself and the one at which it is ended."""


def run_section(name: str, path: Path, seconds: float, device: torch.device) -> None:
    """Run one section in this process and write what it finds."""
    from .part import Part

    if device.type == "cpu":
        torch.set_num_threads(1)
        import tests.interpreter  # noqa: F401
    logging.getLogger("onebit_triton").setLevel(logging.ERROR)
    from .passes import passes
    from .ranks import ranks
    from .speed import compiled_speed, passes_speed, steps_speed, sweep
    from .steps import steps

    sections = {
        "passes": passes, "steps": steps, "ranks": ranks, "speed-passes": passes_speed, "speed-steps": steps_speed,
        "speed-sweep": sweep, "speed-compiled": compiled_speed,
    }  # fmt: skip
    kind, *only = name.split(":")
    part = Part(name, path, seconds, device)
    with part.measuring(name) if kind.startswith("speed") else part.checking(name):
        sections[kind](part, *only)


class Results:
    """All findings, in the JSON file as soon as a section has ended."""

    def __init__(self, output: Path, facts: dict[str, Any]) -> None:
        self._path = output / "results.json"
        self.found: dict[str, Any] = {**facts, "checks": [], "numbers": [], "skipped": []}

    def add(self, part: dict[str, list[dict[str, Any]]]) -> None:
        """Add what a section has found."""
        for kind, entries in part.items():
            self.found[kind] += entries
        self._path.write_text(json.dumps(self.found, indent=1))


class Section:
    """A section that runs in its own process, and process group, so that what it starts ends with it."""

    def __init__(self, name: str, output: Path, seconds: float, device: str) -> None:
        self.name, self.path = name, output / f"part-{name.replace(':', '-')}.json"
        self.deadline = time.monotonic() + seconds + GRACE
        command = [sys.executable, "-m", "benchmarks.gpu", "--section", name, "--part", str(self.path.resolve())]
        environment = {**os.environ, "TRITON_INTERPRET": "1" if device == "cpu" else "0"}
        self._ended = False
        self._process = subprocess.Popen(
            [*command, "--seconds", str(seconds), "--device", device], cwd=ROOT, env=environment, start_new_session=True
        )

    def finish(self) -> dict[str, list[dict[str, Any]]]:
        """Wait for the section, or end it when its time is over; what it found."""
        try:
            status = self._process.wait(max(0.0, self.deadline - time.monotonic()))
            trouble = f"its process ended with status {status}" if status else ""
        except subprocess.TimeoutExpired:
            trouble = "it did not end in time"
        self.end()
        found: dict[str, list[dict[str, Any]]] = {"checks": [], "numbers": [], "skipped": []}
        if self.path.exists():
            found = json.loads(self.path.read_text())
            self.path.unlink()
        if trouble and self.name.startswith("speed"):
            found["skipped"].append({"section": self.name, "name": "the rest", "why": trouble})
        elif trouble:
            found["checks"].append({"section": self.name, "name": "ends", "passed": False, "detail": trouble})
        return found

    def end(self) -> None:
        """End the process and all that it started."""
        if not self._ended:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._ended = True


def run_batch(names: list[str], output: Path, seconds: float, device: str, results: Results) -> None:
    """Run sections side by side."""
    started = [Section(name, output, seconds, device) for name in names]
    try:
        for section in started:
            results.add(section.finish())
    finally:
        for section in started:
            section.end()


def run_all(names: list[str], output: Path, minutes: float, device: str, jobs: int) -> dict[str, Any]:
    """Run sections and gather what they find."""
    from .report import machine

    started = time.monotonic()
    stop = started + 60 * minutes - 2 * GRACE
    checked_by = started + 60 * minutes * CORRECTNESS_SHARE if device == "cuda" else stop
    output.mkdir(parents=True, exist_ok=True)
    results = Results(output, {"machine": machine(torch.device(device)), "started": time.strftime("%Y-%m-%d %H:%M:%S")})
    waiting = [name for name in names if not name.startswith("speed")]
    while waiting:
        batch, waiting = waiting[:jobs], waiting[jobs:]
        run_batch(batch, output, max(0.0, checked_by - time.monotonic()), device, results)
    for name in (name for name in names if name.startswith("speed")):
        seconds = min(SPEED[name], stop - time.monotonic())
        if seconds < 15:
            results.add({"skipped": [{"section": name, "name": "all", "why": "no time left"}]})
        else:
            run_batch([name], output, seconds, device, results)
    return results.found


def main() -> int:
    """Parse the command line; the status says whether all checks passed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    names = (*CORRECTNESS, *SPEED)
    parser.add_argument("--output", type=Path, default=Path("out/gpu"), help="folder for results.json and report.txt")
    parser.add_argument("--minutes", type=float, default=6.0, help="how long the whole run may take")
    parser.add_argument("--sections", nargs="+", choices=names, default=names, metavar="SECTION", help=", ".join(names))
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu only shows that the script works"
    )
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--part", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.section:
        device = torch.device("cuda", 0) if given.device == "cuda" else torch.device("cpu")
        run_section(given.section, given.part, given.seconds, device)
        return 0
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU (--device cpu only shows that the script works)")
    # Correctness needs no quiet machine. Two processors a section: kernels are compiled there.
    jobs = max(1, (os.cpu_count() or 1) // 2) if given.device == "cuda" else 1
    found = run_all(list(given.sections), given.output, given.minutes, given.device, jobs)
    from .report import text

    report = text(found)
    (given.output / "report.txt").write_text(report + "\n")
    print(f"\n{report}\n\nwritten to {given.output}", flush=True)
    return 0 if found["checks"] and all(entry["passed"] for entry in found["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
