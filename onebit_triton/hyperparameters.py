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
        bias_correction, coeff_bias_correction: options of the whole optimizer.
    """

    def __init__(self, replica: Replica, groups: list[int], bias_correction: bool, coeff_bias_correction: bool) -> None:
        self._replica = replica
        self._groups = groups
        self._flags = [float(bias_correction), float(coeff_bias_correction)]
        self._parameters = [p for bucket in replica.buckets for p in bucket.parameters]
        self._rows_of_group = {
            group: torch.tensor([row for row, g in enumerate(groups) if g == group], device=replica.device)
            for group in set(groups)
        }
        self._written: object = None

    def refresh(self, param_groups: list[dict[str, Any]]) -> None:
        """Bring the table up to date, without synchronising.

        A frozen parameter (requires_grad False) gets rate 0. An lr that is a tensor on the device is copied there.
        """
        group_rows = [_row(group) + self._flags for group in param_groups]
        moving = [parameter.requires_grad for parameter in self._parameters]
        device_lr = any(_on_device(group["lr"]) for group in param_groups)
        if moving and (self._written != (group_rows, moving) or device_lr):
            self._written = (group_rows, moving)
            rows = [
                group_rows[group] if moves else [0.0, *group_rows[group][1:]]
                for group, moves in zip(self._groups, moving, strict=True)
            ]
            staged = torch.tensor(rows, dtype=torch.float64).float()
            if self._replica.device.type == "cuda":
                staged = staged.pin_memory()
            self._replica.hyper.copy_(staged, non_blocking=True)
        if device_lr:
            lr = self._replica.hyper[:, Hyper.LR]
            for index, selected in self._rows_of_group.items():
                if _on_device(param_groups[index]["lr"]):
                    value = param_groups[index]["lr"].to(lr.dtype).view(1).expand(selected.numel())
                    lr.index_copy_(0, selected, lr.index_select(0, selected) * value)


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
