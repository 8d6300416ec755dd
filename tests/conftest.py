"""Kernels run in Triton's interpreter on a CPU; the choice is made when they are imported, so it comes first."""

from . import interpreter  # noqa: F401  isort: skip

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from .ranks import RankPool

torch.set_num_threads(1)
# A deadline would be an assertion on wall time. A change is judged by the same examples each time; `make fuzz` draws
# many new ones. Tests in tests/fuzz scale their numbers by that of the profile.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=2000, print_blob=True)
hypothesis.settings.load_profile("tests")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Runs a function on n real processes that share a gloo process group."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    """A test that starts a process group must end it."""
    yield
    assert not torch.distributed.is_initialized()
