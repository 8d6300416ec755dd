"""The hyperparameter table: what param groups say, one row per parameter tensor, on the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .buckets import fingerprint
from .collectives import Communicator
from .kernels.tables import Hyper, Roll, Stamp
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
        self._host_settings = torch.zeros(1, dtype=torch.int32, device=replica.device)
        self._lr_bits = torch.zeros(1, dtype=torch.int32, device=replica.device)
        self._settings = replica.stamp[Stamp.SETTINGS : Stamp.SETTINGS + 1]
        self._answered: object = None

    def refresh(self, param_groups: list[dict[str, Any]]) -> None:
        """Bring the table up to date, without synchronising.

        A frozen parameter (requires_grad False) gets rate 0. An lr that is a tensor on the device is copied there, by
        operations that a CUDA graph repeats.
        """
        group_rows, moving = settings = self._read(param_groups)
        device_lr = any(_on_device(group["lr"]) for group in param_groups)
        lr = self._replica.hyper[:, Hyper.LR]
        if moving and self._written != settings:
            self._written = settings
            rows = [
                group_rows[group] if moves else [0.0, *group_rows[group][1:]]
                for group, moves in zip(self._groups, moving, strict=True)
            ]
            self._replica.hyper.copy_(self._staged(torch.tensor(rows, dtype=torch.float64).float()), non_blocking=True)
            self._host_lr.copy_(lr)
            word = torch.tensor([_word(settings)], dtype=torch.int64).to(torch.int32)
            self._host_settings.copy_(self._staged(word), non_blocking=True)
            self._settings.copy_(self._host_settings)
        if moving and device_lr:
            for index, group in enumerate(param_groups):
                factor = self._lr_of_group[index : index + 1]  # empty for a last group that has no elements
                if _on_device(group["lr"]) and factor.numel():
                    factor.copy_(group["lr"].view(1))
                else:
                    factor.fill_(1.0)
            torch.index_select(self._lr_of_group, 0, self._group_of_segment, out=self._lr_of_segment)
            torch.mul(self._host_lr, self._lr_of_segment, out=lr)
            torch.sum(self._lr_of_group.view(torch.int32), 0, keepdim=True, dtype=torch.int32, out=self._lr_bits)
            torch.add(self._host_settings, self._lr_bits, out=self._settings)

    def answer(self, param_groups: list[dict[str, Any]], steps: int) -> Tensor:
        """This rank's answer to the roll call of a warmup step, fp32 [ranks * len(Roll)], zeros but for its own row.

        A rate that is a tensor on the device is not in it; the messages of compressed steps have it.

        Args:
            param_groups: as they are now.
            steps: taken so far.
        """
        known, answer = (*self._read(param_groups), steps), self._replica.answer
        if self._answered != known and not self._replica.capturing():
            self._answered = known
            bytes_of_word = [float(byte) for byte in (_word(known) & 0xFFFFFFFF).to_bytes(4, "little")]
            own = answer[self._replica.communicator.rank, : Roll.FAILED]
            own.copy_(self._staged(torch.tensor(bytes_of_word)), non_blocking=True)
        return answer.view(-1)

    def _read(self, param_groups: list[dict[str, Any]]) -> tuple[list[list[float]], list[bool]]:
        """What param groups say, a row each, and which parameters move."""
        rows = [_row(group) + self._flags for group in param_groups]
        return rows, [parameter.requires_grad for parameter in self._parameters]

    def _staged(self, values: Tensor) -> Tensor:
        """Values on the host, ready to be copied to the device without waiting."""
        return values.pin_memory() if self._replica.device.type == "cuda" else values


def difference(communicator: Communicator, param_groups: list[dict[str, Any]], steps: int) -> str | None:
    """Name the first hyperparameter that is not the same on all ranks (collective).

    Args:
        communicator: of the optimizer.
        param_groups: of this rank.
        steps: that this rank has taken.

    Returns:
        None, or on every rank the same sentence, which says who has what.
    """
    names = ["the number of steps"]
    values = [float(steps)]
    for index, group in enumerate(param_groups):
        names += [f"{column.name.lower()} of param group {index}" for column in Hyper][: len(_row(group))]
        values += [float(group["lr"]), *_row(group)[1:]]
        names.append(f"requires_grad of the parameters of group {index}")
        values.append(float(sum(p.requires_grad << i % 48 for i, p in enumerate(group["params"]))))
    bits = torch.tensor(values, dtype=torch.float64).view(torch.int64).tolist()
    rows = torch.tensor(communicator.gather_numbers(bits))
    for column, name in enumerate(names):
        for rank, row in enumerate(rows):
            if row[column] != rows[0, column]:
                theirs, ours = (value.view(torch.float64).item() for value in (row[column], rows[0, column]))
                return f"{name}: rank {rank} has {theirs:.9g}, rank 0 has {ours:.9g}"
    return None


def _word(known: object) -> int:
    """Signed 32-bit fingerprint."""
    return ((fingerprint(known) & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


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
        float(group["max_rate_ratio"]),
    ]  # fmt: skip
