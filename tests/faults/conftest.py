"""One harness for all tables."""

from collections.abc import Iterator

import pytest

from .harness import Harness


@pytest.fixture(scope="package")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """Runs cells."""
    harness = Harness(tmp_path_factory.mktemp("cells"))
    yield harness
    harness.close()
