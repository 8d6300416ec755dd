"""The tests over the versions that pyproject.toml promises, from the oldest to the newest: `make matrix`.

torch's CUDA wheels require one exact Triton, so a version of torch is a pair. What depends on neither of the two, the
trainers and the benchmarks are left to `make test`. Needs the interpreters, and about 10 GB of disk.
"""

from __future__ import annotations

import nox

nox.options.default_venv_backend = "uv|virtualenv"

VERSIONS = [
    ("3.10", "2.12.0"),  # with Triton 3.7.0: the oldest of all three
    ("3.12", "2.14.1"),  # 3.8.0
    ("3.13", "2.15.0"),  # 3.9.0: the newest; it has no wheels for Python 3.10
]
"""Python and torch, beside the pair that constraints.txt pins."""

TESTS = [
    "tests/test_torch_contract.py", "tests/test_imports.py", "tests/test_buckets.py", "tests/test_options.py",
    "tests/test_optimizer.py", "tests/test_precision.py", "tests/distributed", "tests/kernels", "tests/aot",
]  # fmt: skip


@nox.session
@nox.parametrize("python,torch", VERSIONS)
def tests(session: nox.Session, torch: str) -> None:
    """Run what depends on torch or Triton; arguments after -- replace the list of tests."""
    session.install(f"torch=={torch}", "-e", ".[bench]", "pytest-xdist", "hypothesis")
    session.run("python", "-m", "pytest", "-n", "2", *(session.posargs or TESTS))
