"""The implementations of every pass, chosen by name: Triton kernels, their plain-torch twins, or those compiled."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from .updates import compressed_update, lamb_update

PASSES = {
    "gradients": ("flatten_gradients", "gradient_norms"),
    "decision": ("decide_averaged", "clip_local", "decide_exchanged", "accept_returned"),
    "lamb": ("lamb_moments", "trust_ratio", "lamb_apply"),
    "momentum": ("compress_momentum", "seal_worker", "undo_momentum"),
    "server": ("reduce_chunk", "seal_server"),
    "variance": ("fresh_variance", "soft_threshold_rate", "compressed_apply"),
}
"""Module of this package -> the passes it holds; the twins are in <module>_reference as <pass>_reference."""

BACKENDS = ("auto", "triton", "torch", "inductor")


class Passes(SimpleNamespace):
    """The passes of one backend, as attributes named as in `PASSES`, and the updates made of them; `name` is its own.

    Stages call the updates, not what they are made of.
    """

    name: str

    def __getattr__(self, attribute: str) -> Callable[..., None]:
        raise AttributeError(f"no pass named {attribute}")


def triton_available() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def load_passes(backend: str, device: torch.device) -> Any:
    """Passes for tensors on a device; Triton is imported only if it is what was asked for.

    Args:
        backend: "triton" (CUDA tensors, or any when TRITON_INTERPRET=1 is set), "torch" (plain torch), "inductor"
            (the same, compiled by torch.compile), or "auto" (triton on CUDA, torch elsewhere).
        device: where the parameters are.

    Raises:
        ValueError: for an unknown backend, or "triton" on a device it cannot run on.
        ImportError: if Triton is needed and not installed.
        RuntimeError: if "inductor" finds no C++ compiler on a CPU.
    """
    if backend not in BACKENDS:
        raise ValueError(f"Invalid {backend=}. Must be one of {', '.join(BACKENDS)}.")
    if backend == "auto":
        backend = "triton" if device.type == "cuda" else "torch"
    if backend == "triton":
        if not triton_available():
            raise ImportError(
                "backend='triton' needs Triton, which is not installed: pip install triton, or use backend='torch'."
            )
        if device.type != "cuda" and os.environ.get("TRITON_INTERPRET", "0") != "1":
            raise ValueError(
                f"Invalid {backend=} for parameters on {device}. Must be CUDA tensors, unless TRITON_INTERPRET=1 is "
                "set before onebit_triton's kernels are imported; use backend='torch' or 'auto'."
            )
    if backend == "inductor":
        from .inductor import InductorPasses

        return InductorPasses(device, load_passes("torch", device))
    suffix = "_reference" if backend == "torch" else ""
    found: dict[str, Any] = {"name": backend}
    for module, names in PASSES.items():
        loaded = importlib.import_module(f"{__package__}.{module}{suffix}")
        found.update({name: getattr(loaded, name + suffix) for name in names})
    passes = Passes(**found)
    for update in (lamb_update, compressed_update):
        setattr(passes, update.__name__, partial(update, passes))
    return passes
