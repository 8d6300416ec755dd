"""Run train_lm.py in processes of its own, on one machine: what demo.py and freeze_step.py have in common."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # several processes share the cores
    # glibc returns every freed array above 128 KiB to the system and pays for its pages again at the next
    # operation: half of an optimizer step at this size.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}


def run_training(processes: int, label: str, result: Path, options: list[str]) -> dict[str, Any]:
    """Run one training; exits with an error if it failed.

    Args:
        processes: how many.
        label: text in front of the progress bar.
        result: JSON file for train_lm.py to write.
        options: of train_lm.py.

    Returns:
        What `train_lm.py` wrote.
    """
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}"]
    # Rendezvous over the loopback: the host's own name does not resolve everywhere.
    command += ["--standalone", "--local-addr=127.0.0.1", str(Path(__file__).with_name("train_lm.py"))]
    command += [f"--label={label}", f"--out={result}", *options]
    finished = subprocess.run(command, env={**ENVIRONMENT, **os.environ}, check=False)
    if finished.returncode != 0:
        sys.exit(f"The training {label.strip()} failed (exit status {finished.returncode}); its error is above.")
    return json.loads(result.read_text())
