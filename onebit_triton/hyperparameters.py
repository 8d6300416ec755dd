"""The hyperparameter table: what param groups say, one row per parameter tensor, on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .kernels.tables import Hyper
from .stages import Replica


class HyperTable:
    """Keeps a replica's table equal to the param groups; copies only when a scheduler changed something.

    Args:
        replica: whose table.
        groups: index of the param group of each segment, in segment order.
        coeff_bias_correction: option of the whole optimizer.
    """

    def __init__(self, replica: Replica, groups: list[int], coeff_bias_correction: bool) -> None:
        self._replica = replica
        self._groups = groups
        self._flags = [float(coeff_bias_correction)]
        self._parameters = [p for bucket in replica.buckets for p in bucket.parameters]
        self._written: object = None
        # For rates that are tensors on the device: nothing may be allocated where a CUDA graph is captured.
        self._group_of_segment = torch.tensor(groups, dtype=torch.int64, device=replica.device)
        self._lr_of_group = torch.ones(max(groups, default=0) + 1, dtype=torch.float32, device=replica.device)
        self._lr_of_segment = torch.ones(len(groups), dtype=torch.float32, device=replica.device)
        self._host_lr = torch.ones_like(self._lr_of_segment)

    def refresh(self, param_groups: list[dict[str, Any]]) -> None:
        """Bring the table up to date, without synchronising.

        A frozen parameter (requires_grad False) gets rate 0. An lr that is a tensor on the device is copied there, by
        operations that a CUDA graph repeats.
        """
        group_rows = [_row(group) + self._flags for group in param_groups]
        moving = [parameter.requires_grad for parameter in self._parameters]
        device_lr = any(_on_device(group["lr"]) for group in param_groups)
        lr = self._replica.hyper[:, Hyper.LR]
        if moving and self._written != (group_rows, moving):
            self._written = (group_rows, moving)
            rows = [
                group_rows[group] if moves else [0.0, *group_rows[group][1:]]
                for group, moves in zip(self._groups, moving, strict=True)
            ]
            staged = torch.tensor(rows, dtype=torch.float64).float()
            if self._replica.device.type == "cuda":
                staged = staged.pin_memory()
            self._replica.hyper.copy_(staged, non_blocking=True)
            self._host_lr.copy_(lr)
        if moving and device_lr:
            for index, group in enumerate(param_groups):
                factor = self._lr_of_group[index : index + 1]  # empty for a last group that has no elements
                if _on_device(group["lr"]) and factor.numel():
                    factor.copy_(group["lr"].view(1))
                else:
                    factor.fill_(1.0)
            torch.index_select(self._lr_of_group, 0, self._group_of_segment, out=self._lr_of_segment)
            torch.mul(self._host_lr, self._lr_of_segment, out=lr)


def _on_device(lr: float | Tensor) -> bool:
    return isinstance(lr, Tensor) and lr.device.type != "cpu"


def _row(group: dict[str, Any]) -> list[float]:
    """Columns of `Hyper` up to the flags; complements are taken in double precision, as torch's optimizers do.

    The rate column is 1 where the rate is a tensor on the device: it is multiplied in there.
    """
    beta1, beta2 = (float(beta) for beta in group["betas"])
    coeff_beta, threshold = float(group["coeff_beta"]), float(group["factor_threshold"])
    return [
        1.0 if _on_device(group["lr"]) else float(group["lr"]),
        beta1, 1 - beta1, beta2, 1 - beta2,
        float(group["eps"]), float(group["weight_decay"]),
        float(group["min_coeff"]), float(group["max_coeff"]), coeff_beta, 1 - coeff_beta,
        float(group["factor_min"]), float(group["factor_max"]), 1 - threshold, 1 + threshold,
    ]  # fmt: skip
