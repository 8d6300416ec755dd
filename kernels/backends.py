"""The two implementations of every pass, chosen by name: Triton kernels, or their plain-torch twins."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

PASSES = {
    "gradients": ("flatten_gradients", "gradient_norms"),
    "decision": ("decide_averaged", "clip_local", "decide_exchanged"),
    "lamb": ("lamb_moments", "trust_ratio", "lamb_apply"),
    "momentum": ("compress_momentum", "seal_worker", "undo_momentum"),
    "server": ("reduce_chunk", "seal_server"),
    "variance": ("fresh_variance", "soft_threshold_rate", "compressed_apply"),
}
"""Module of this package -> the passes it holds; the twins are in <module>_reference as <pass>_reference."""

BACKENDS = ("auto", "triton", "torch")


class Passes(SimpleNamespace):
    """The passes of one backend, as attributes named as in `PASSES`; `name` is the backend's."""

    name: str

    def __getattr__(self, attribute: str) -> Callable[..., None]:
        raise AttributeError(f"no pass named {attribute}")


def triton_available() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def load_passes(backend: str, device: torch.device) -> Passes:
    """Passes for tensors on a device; Triton is imported only if it is what was asked for.

    Args:
        backend: "triton" (CUDA tensors, or any when TRITON_INTERPRET=1 is set), "torch" (plain torch), or "auto"
            (triton on CUDA, torch elsewhere).
        device: where the parameters are.

    Raises:
        ValueError: for an unknown backend, or "triton" on a device it cannot run on.
        ImportError: if Triton is needed and not installed.
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
    suffix = "_reference" if backend == "torch" else ""
    found: dict[str, Any] = {"name": backend}
    for module, names in PASSES.items():
        loaded = importlib.import_module(f"{__package__}.{module}{suffix}")
        found.update({name: getattr(loaded, name + suffix) for name in names})
    return Passes(**found)
