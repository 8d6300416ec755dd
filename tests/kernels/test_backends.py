"""The choice between kernels and twins."""

from __future__ import annotations

import inspect

import pytest
import torch

from onebit_triton.kernels import backends
from onebit_triton.kernels.backends import PASSES, load_passes

from .bed import CPU, TORCH, TRITON

NAMES = [name for names in PASSES.values() for name in names]


@pytest.mark.parametrize("backend", ["cuda", "", "Triton"])
def test_unknown_backend(backend: str) -> None:
    with pytest.raises(ValueError, match=f"Invalid backend='{backend}'. Must be one of auto, triton, torch, inductor."):
        load_passes(backend, CPU)


def test_auto_depends_on_the_device() -> None:
    assert load_passes("auto", CPU).name == "torch"
    assert load_passes("auto", torch.device("cuda", 0)).name == "triton"


def test_passes_are_those_of_the_backend() -> None:
    assert (TRITON.name, TORCH.name) == ("triton", "torch")
    for name in NAMES:
        assert getattr(TRITON, name).__name__ == name
        assert getattr(TORCH, name).__name__ == f"{name}_reference"


@pytest.mark.parametrize("name", NAMES)
def test_kernel_and_twin_have_one_signature(name: str) -> None:
    assert inspect.signature(getattr(TRITON, name)) == inspect.signature(getattr(TORCH, name))


def test_unknown_pass() -> None:
    with pytest.raises(AttributeError, match="no pass named comperss_momentum"):
        TORCH.comperss_momentum  # noqa: B018


@pytest.mark.parametrize("value", [None, "0"])
def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv("TRITON_INTERPRET")
    else:
        monkeypatch.setenv("TRITON_INTERPRET", value)
    with pytest.raises(
        ValueError, match=r"Invalid backend='triton' for parameters on cpu.*TRITON_INTERPRET=1.*'torch'"
    ):
        load_passes("triton", CPU)


def test_triton_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "triton_available", lambda: False)
    for backend, device in (("triton", CPU), ("auto", torch.device("cuda"))):
        with pytest.raises(ImportError, match="needs Triton, which is not installed: pip install triton, or use"):
            load_passes(backend, device)
    assert load_passes("auto", CPU).name == "torch"


def test_availability_is_found_without_importing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends.triton_available()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not backends.triton_available()
