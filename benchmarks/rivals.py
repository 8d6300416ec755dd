"""Optimizers to compare with, on the same tensors. Each builder takes parameters and a stage and returns an optimizer.

`"warmup"` stands for any step at full precision; only DeepSpeed's OnebitLamb has the stage `"compression"` too.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

LR, WEIGHT_DECAY, EPS = 1e-4, 0.01, 1e-8
"""What every optimizer is given. The learning rate is small, so that steps can be repeated on one gradient."""


def adamw(params: list[Any], implementation: str) -> Optimizer:
    """torch's AdamW: "fused" or "foreach"."""
    return torch.optim.AdamW(params, lr=LR, weight_decay=WEIGHT_DECAY, eps=EPS, **{implementation: True})


def lamb(params: list[Any], foreach: bool) -> Optimizer:
    """pytorch-optimizer's Lamb; by default it takes tensor after tensor on a CPU, and all at once on a GPU."""
    from pytorch_optimizer import Lamb

    return Lamb(params, lr=LR, weight_decay=WEIGHT_DECAY, eps=EPS, foreach=foreach)


def deepspeed_onebit_lamb(params: list[Any], stage: str, freeze_step: int = 3, **options: Any) -> Optimizer:
    """DeepSpeed's OnebitLamb with its real `step`, ready for steps of one stage (collective).

    Its first call only sets up and spoils the momentum, and counts as a step; it is made here, on gradients of zero.
    """
    optimizer = _import_onebit_lamb()(
        params,
        # What it asks of an engine.
        deepspeed=SimpleNamespace(mpu=None, local_rank=0, enable_backward_allreduce=True),
        freeze_step=freeze_step if stage == "compression" else 10**9,
        comm_backend_name="compressed",
        **{"lr": LR, "weight_decay": WEIGHT_DECAY, "eps": EPS} | options,
    )
    grads = [param.grad for param in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return optimizer


def missing(name: str, device: torch.device) -> str | None:
    """Why an implementation cannot be measured here; None if it can."""
    if name.startswith("deepspeed"):
        if importlib.util.find_spec("deepspeed") is None:
            return "deepspeed is not installed: pip install --no-build-isolation deepspeed==0.19.6"
        if device.type != "cpu":
            return "deepspeed's packed-sign op is stood in for on CPUs only"
    if name.startswith("lamb") and importlib.util.find_spec("pytorch_optimizer") is None:
        return "pytorch-optimizer is not installed: pip install pytorch-optimizer"
    return None


def deepspeed_bytes_sent() -> int:
    """Bytes that this process has sent in DeepSpeed's exchanges."""
    import deepspeed.runtime.comm.compressed as backend

    return backend.dist.bytes_sent


RIVALS: dict[str, dict[str, Callable[[list[Any]], Optimizer]]] = {
    "deepspeed-onebitlamb": {
        "warmup": lambda params: deepspeed_onebit_lamb(params, "warmup"),
        "compression": lambda params: deepspeed_onebit_lamb(params, "compression"),
    },
    "lamb": {"warmup": lambda params: lamb(params, False)},
    "lamb-foreach": {"warmup": lambda params: lamb(params, True)},
    "adamw-foreach": {"warmup": lambda params: adamw(params, "foreach")},
    "adamw-fused": {"warmup": lambda params: adamw(params, "fused")},
}
"""Name -> stage -> builder."""


class _Packer:
    """Stands in for DeepSpeed's packed-sign op, which it has for XPU only."""

    @staticmethod
    def packbits(values: Tensor, size: int, rank: int) -> Tensor:
        return torch.from_numpy(np.packbits(values.numpy() >= 0))

    @staticmethod
    def unpackbits(packed: Tensor, size: int, rank: int) -> Tensor:
        return torch.from_numpy(np.unpackbits(packed.numpy())).float().mul_(2.0).sub_(1.0)


class _PackerBuilder:
    def load(self) -> type[_Packer]:
        return _Packer


def _import_onebit_lamb() -> type[Optimizer]:
    """OnebitLamb, with stand-ins for what it takes from elsewhere: the packed-sign op and collectives of its own."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.comm
    import deepspeed.runtime.comm.compressed as backend
    from deepspeed.runtime.fp16.onebit.lamb import OnebitLamb

    # It would be compiled for minutes, and is not used here. As an attribute, deepspeed.comm.torch is torch itself.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed("gloo", verbose=False)
    backend.PackbitsBuilder = _PackerBuilder
    backend.dist = _Collectives(deepspeed.comm)
    return OnebitLamb


class _Collectives:
    """deepspeed.comm, as far as the exchange needs it, with its bytes counted as ours are.

    gloo refuses to gather a tensor without dimensions into tensors of one element: it is gathered as one element.
    """

    def __init__(self, comm: ModuleType) -> None:
        self._comm = comm
        self.bytes_sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_to_all_single(self, received: Tensor, sent: Tensor, group: Any) -> object:
        ranks = self._comm.get_world_size(group=group)
        self.bytes_sent += sent.nbytes // ranks * (ranks - 1)
        return self._comm.all_to_all_single(received, sent, group=group)

    def all_gather(self, gathered: list[Tensor], sent: Tensor, group: Any) -> object:
        self.bytes_sent += sent.nbytes * (len(gathered) - 1)
        return self._comm.all_gather(gathered, sent.view(1) if sent.dim() == 0 else sent, group=group)
