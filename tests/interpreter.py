"""Triton's interpreter, made fit for tests: quick, and rounding to bf16 as a GPU does. Changes no result otherwise."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter


class _NothingToRestore:
    def restore(self) -> None:
        pass


class _PatchOnce:
    """Patches each module of triton.language once a launch; the interpreter does it at every device function (4 ms)."""

    def __init__(self) -> None:
        self._original: Callable[[Any], Any] = interpreter._patch_lang
        self._patched: set[int] = set()
        self._scopes: list[Any] = []

    def __call__(self, fn: Any) -> Any:
        modules = {id(value) for value in fn.__globals__.values() if value is tl or value is tl.core}
        if modules and modules <= self._patched:
            return _NothingToRestore()
        self._patched |= modules
        self._scopes.append(self._original(fn))
        return self

    def restore(self) -> None:
        """Undo everything; the interpreter calls it when the launch ends."""
        while self._scopes:
            self._scopes.pop().restore()
        self._patched.clear()


@functools.cache
def _size_and_shape(shape: tuple[int, ...]) -> tuple[tl.constexpr, tl.tuple]:
    return tl.constexpr(math.prod(shape)), tl.tuple([tl.constexpr(size) for size in shape])


def _initialize_tensor(self: tl.tensor, handle: Any, type: Any) -> None:
    """As `tl.tensor` does; but it makes size and shape anew for every result, a quarter of a launch's time."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _size_and_shape(tuple(type.shape) if type.is_block() else ())


def _round_to_bfloat16() -> None:
    """Cast fp32 to bf16 to nearest even; the interpreter truncates."""
    original = interpreter.InterpreterBuilder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(src.data)).to(torch.bfloat16)
            return interpreter.TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), dst_type.scalar)
        return original(self, src, dst_type)

    interpreter.InterpreterBuilder.cast_impl = cast_impl


ORIGINAL_INITIALIZE = tl.tensor.__init__
"""What a test compares ours with."""
ORIGINAL_CAST = interpreter.InterpreterBuilder.cast_impl
"""What a test checks for having been mended upstream."""

interpreter._patch_lang = _PatchOnce()
tl.tensor.__init__ = _initialize_tensor
# Overflow of integers is looked for where offsets are tested, not in every addition of every test.
interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
_round_to_bfloat16()
