"""Importing needs neither Triton nor a GPU, and starts neither."""

from __future__ import annotations

import subprocess
import sys

import pytest


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_light() -> None:
    """The CPU path trains without Triton being imported or CUDA initialised."""
    python(
        """
import sys, torch
from onebit_triton import OneBitLamb
assert "triton" not in sys.modules, "importing onebit_triton imported Triton"
parameter = torch.nn.Parameter(torch.ones(3))
optimizer = OneBitLamb([parameter], freeze_step=1)
parameter.grad = torch.ones(3)
optimizer.step()
optimizer.step()
assert optimizer.stage == "compression"
# torch's optimizers import Triton themselves at the first step, but the kernels are not.
assert "onebit_triton.kernels.common" not in sys.modules
assert not torch.cuda.is_initialized()
"""
    )


def test_works_where_triton_is_not_installed() -> None:
    python(
        """
import sys
from importlib.abc import MetaPathFinder

class NoTriton(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(name)

import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else real(name, *rest)
sys.meta_path.insert(0, NoTriton())
import torch
from onebit_triton import OneBitLamb
parameter = torch.nn.Parameter(torch.ones(3))
OneBitLamb([parameter], freeze_step=1).step()
try:
    OneBitLamb([parameter], backend="triton")
except ImportError as error:
    assert "pip install triton" in str(error)
else:
    raise AssertionError("nothing was raised")
"""
    )


@pytest.mark.parametrize("code", ["from kernels import lamb", "import kernels; kernels.lamb"])
def test_kernels_have_one_name(code: str) -> None:
    with pytest.raises(AssertionError, match=r"must be imported as `onebit_triton.kernels`"):
        python(code)


def test_no_module_is_there_twice() -> None:
    with pytest.raises(AssertionError, match=r"No module named 'kernels\.lamb'"):
        python("import kernels.lamb")


def test_looking_for_another_library_named_kernels_finds_nothing() -> None:
    """What transformers does, when the repository's root is on sys.path, before it can be used at all."""
    python("import kernels; assert getattr(kernels, '__version__', None) is None")
