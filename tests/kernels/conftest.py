"""Fixtures for tests of kernels."""

from __future__ import annotations

import pytest

from onebit_triton.kernels import common


@pytest.fixture
def loops_as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels walk a block in the pieces that they take on a GPU; in the interpreter they take it whole."""
    monkeypatch.setattr(common, "interpreted", lambda: False)
    assert common.planes_at_once() == 1
    assert common.tile_elements(1024) == 128
