"""What the tests change in Triton's interpreter is still needed, and right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from ..interpreter import ORIGINAL_CAST, ORIGINAL_INITIALIZE
from .bed import same_bits

SPECIAL = [
    1 + 2**-8,  # a tie: down to even
    1 + 3 * 2**-8,  # a tie: up to even
    1 + 2**-8 + 2**-23,
    -(1 + 3 * 2**-9),
    3.3961775e38,  # overflows when rounded
    1e-39,
    9.2e-41,
    float("inf"),
    -float("inf"),
    float("nan"),
    0.0,
    -0.0,
]


@triton.jit
def _cast(x, DTYPE: tl.constexpr):
    return x.to(DTYPE)


@triton.jit
def _store_kernel(x_ptr, out_ptr, DTYPE: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, _cast(tl.load(x_ptr + i), DTYPE))


def cast(implementation: Callable[..., Any], value: float) -> float:
    handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
    bits = implementation(interpreter.interpreter_builder, handle, tl.bfloat16).data
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).item()


def test_unpatched_cast_still_truncates() -> None:
    value = 1 + 0.75 * 2**-7
    assert cast(ORIGINAL_CAST, value) == 1.0, (
        "Triton's interpreter rounds fp32 to bf16 correctly now: delete _round_to_bfloat16 and ORIGINAL_CAST from "
        "tests/interpreter.py, and this test."
    )
    assert cast(interpreter.InterpreterBuilder.cast_impl, value) == 1 + 2**-7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.filterwarnings("ignore:overflow")
def test_stores_round_to_nearest_even(dtype: torch.dtype) -> None:
    triton_dtype = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
    x = torch.randn(1024, generator=torch.Generator().manual_seed(0))
    x[: len(SPECIAL)] = torch.tensor(SPECIAL)
    out = torch.zeros(1024, dtype=dtype)
    _store_kernel[(1,)](x, out, triton_dtype, 1024)
    assert same_bits(out, x.to(dtype))


@pytest.mark.parametrize("kind", [tl.float32, tl.pointer_type(tl.int8), tl.block_type(tl.int32, [4, 8])], ids=str)
def test_tensors_are_as_triton_makes_them(kind: tl.dtype) -> None:
    ours, theirs = tl.tensor("handle", kind), object.__new__(tl.tensor)
    ORIGINAL_INITIALIZE(theirs, "handle", kind)
    assert vars(ours) == vars(theirs)
    assert ours.shape.values == theirs.shape.values


def test_language_is_as_before_after_a_launch() -> None:
    """Patching each module once a launch must not leave the interpreter's functions behind, nor after an error."""
    before = {name: getattr(tl, name) for name in dir(tl)}
    members = {name: getattr(tl.tensor, name) for name in dir(tl.tensor) if not name.startswith("__")}
    x = torch.zeros(16)
    for stop in (16, 3):  # arange refuses 3
        out = torch.zeros(16)
        if stop == 16:
            _store_kernel[(1,)](x, out, tl.float32, stop)
        else:
            with pytest.raises(Exception, match="power of 2"):
                _store_kernel[(1,)](x, out, tl.float32, stop)
        assert all(getattr(tl, name) is value for name, value in before.items())
        assert all(getattr(tl.tensor, name) is value for name, value in members.items())
