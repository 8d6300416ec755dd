"""Kernels run in Triton's interpreter on a CPU; the choice is made when they are imported, so it comes first."""

from . import interpreter  # noqa: F401  isort: skip

from collections.abc import Iterator

import hypothesis
import pytest
import torch

from .ranks import RankPool
from .recipes import MODULES, Launcher

torch.set_num_threads(1)
# A deadline would be an assertion on wall time. A change is judged by the same examples each time; `make fuzz` draws
# many new ones. Tests in tests/fuzz scale their numbers by that of the profile.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=5000, print_blob=True)
hypothesis.settings.load_profile("tests")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests come first: one that starts last would leave the other workers of pytest-xdist idle."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Runs a function on n real processes that share a gloo process group."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launcher:
    """Runs an example on n real processes, without torchrun."""
    return Launcher(MODULES, tmp_path_factory.mktemp("launched"))


@pytest.fixture(autouse=True)
def no_process_group() -> Iterator[None]:
    """A test that starts a process group must end it."""
    yield
    assert not torch.distributed.is_initialized()
