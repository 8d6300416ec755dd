"""What users may pass: every option checked, every message naming the option, the rule and the value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .buckets import DTYPES, memory_order_is_dense
from .eight_bits import DTYPE as EIGHT_BITS

OPTIMIZER_OPTIONS = (
    "freeze_step", "max_freeze_step", "bias_correction", "coeff_bias_correction", "maximize", "max_grad_norm",
    "gradient_dtype", "scale", "max_skipped_steps", "check_replicas_every", "process_group", "backend",
    "bucket_elements", "block_elements",
)  # fmt: skip
"""Options of the whole optimizer; every param group may set the others for itself."""


def _number(value: Any) -> float:
    """Value as a float, NaN if it is none; a tensor on an accelerator counts as 0, to spare a synchronisation."""
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" else 0.0
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check(name: str, value: Any, rule: str, holds: bool, where: str) -> None:
    if not holds:
        raise ValueError(f"Invalid {name}={value!r}{where}. Must be {rule}.")


def check_group(group: dict[str, Any], index: int) -> None:
    """Check the hyperparameters and the mask of one param group.

    Raises:
        ValueError: naming the option, its value, the group and the rule.
    """
    where = f" in param group {index}"
    for name in OPTIMIZER_OPTIONS:
        if name in group:
            raise ValueError(f"Invalid {name}={group[name]!r}{where}. Must be given to the optimizer, not to a group.")
    check_hyperparameters(group, where)
    _check_mask(group, index)


def check_hyperparameters(group: dict[str, Any], where: str) -> None:
    """Check the hyperparameters that every param group may set for itself.

    Raises:
        ValueError: naming the option, its value, where it stands and the rule.
    """
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"Invalid lr={lr!r}{where}. Must be a number or a tensor of one element.")
    _check("lr", lr, "a finite number >= 0.0", 0.0 <= _number(lr) < math.inf, where)
    betas = group["betas"]
    pair = isinstance(betas, Sequence) and len(betas) == 2
    _check("betas", betas, "a pair of numbers, each in [0.0, 1.0)", pair, where)
    for beta in betas:
        _check("betas", betas, "a pair of numbers, each in [0.0, 1.0)", 0.0 <= _number(beta) < 1.0, where)
    _check("eps", group["eps"], "a finite number > 0.0", 0.0 < _number(group["eps"]) < math.inf, where)
    decay = group["weight_decay"]
    _check("weight_decay", decay, "a finite number >= 0.0", 0.0 <= _number(decay) < math.inf, where)
    for low_name, high_name in (("min_coeff", "max_coeff"), ("factor_min", "factor_max")):
        low, high = group[low_name], group[high_name]
        _check(low_name, low, "a finite number > 0.0", 0.0 < _number(low) < math.inf, where)
        _check(high_name, high, "a finite number > 0.0", 0.0 < _number(high) < math.inf, where)
        _check(low_name, low, f"<= {high_name}={high!r}", low <= high, where)
    beta = group["coeff_beta"]
    _check("coeff_beta", beta, "a number in [0.0, 1.0)", 0.0 <= _number(beta) < 1.0, where)
    ratio = group["max_rate_ratio"]
    _check("max_rate_ratio", ratio, "a number > 0.0", _number(ratio) > 0.0, where)
    threshold = group["factor_threshold"]
    _check("factor_threshold", threshold, "a number in [0.0, 1.0)", 0.0 <= _number(threshold) < 1.0, where)


def _check_mask(group: dict[str, Any], index: int) -> None:
    mask = group["exp_avg_mask"]
    if mask is None:
        return
    if not isinstance(mask, Tensor):
        raise ValueError(f"Invalid exp_avg_mask in param group {index}. Must be a tensor or None, got {type(mask)}.")
    for number, parameter in enumerate(group["params"]):
        try:
            fits = torch.broadcast_shapes(mask.shape, parameter.shape) == parameter.shape
        except RuntimeError:
            fits = False
        if not fits:
            raise ValueError(
                f"Invalid exp_avg_mask of shape {tuple(mask.shape)} in param group {index}. Must be broadcastable to "
                f"every parameter of the group; parameter {number} has shape {tuple(parameter.shape)}."
            )


def check_parameter(parameter: Tensor, name: str, device: torch.device) -> None:
    """Check that a parameter can be optimised.

    Args:
        parameter: the tensor.
        name: what messages call it.
        device: where the first parameter is.

    Raises:
        ValueError: saying what is wrong with which parameter.
    """
    kind = type(parameter).__name__
    if kind == "DTensor" or hasattr(parameter, "device_mesh"):
        raise ValueError(f"Invalid {name}: DTensor parameters (sharded training) are not supported; use DDP.")
    if parameter.layout != torch.strided:
        raise ValueError(f"Invalid {name}: must be dense, got layout {parameter.layout}.")
    if parameter.dtype not in DTYPES:
        allowed = ", ".join(str(dtype) for dtype in DTYPES)
        raise ValueError(f"Invalid {name}: dtype must be one of {allowed}, got {parameter.dtype}.")
    if parameter.device != device:
        raise ValueError(
            f"Invalid {name}: all parameters must be on one device, got {parameter.device} after {device}."
        )
    if parameter.device.type == "meta":
        raise ValueError(f"Invalid {name}: must hold data, got a meta tensor.")
    if not memory_order_is_dense(parameter):
        raise ValueError(
            f"Invalid {name}: must fill its memory without gaps or overlaps, got shape {tuple(parameter.shape)} "
            f"with strides {parameter.stride()}; use a contiguous parameter."
        )


def check_optimizer(
    freeze_step: Any, max_freeze_step: Any, max_grad_norm: Any, gradient_dtype: Any, scale: Any,
    max_skipped_steps: Any, check_replicas_every: Any, bucket_elements: Any, block_elements: Any, **flags: Any,
) -> None:  # fmt: skip
    """Check the options of the whole optimizer.

    Raises:
        ValueError: naming the option, its value and the rule.
    """
    if isinstance(freeze_step, str):
        rule = 'an integer >= 1 (the number of warmup steps), or "auto"'
        _check("freeze_step", freeze_step, rule, freeze_step == "auto", "")
        rule = 'an integer >= 1 with freeze_step="auto" (the most warmup steps)'
        _check("max_freeze_step", max_freeze_step, rule, _is_count(max_freeze_step), "")
    else:
        check_steps("freeze_step", freeze_step)
        rule = 'None, unless freeze_step is "auto"'
        _check("max_freeze_step", max_freeze_step, rule, max_freeze_step is None, "")
    _check("max_skipped_steps", max_skipped_steps, "an integer >= 1", _is_count(max_skipped_steps), "")
    if check_replicas_every is not None:
        holds = _is_count(check_replicas_every)
        _check("check_replicas_every", check_replicas_every, "None or an integer >= 1", holds, "")
    if max_grad_norm is not None:
        _check("max_grad_norm", max_grad_norm, "None or a number > 0.0", _number(max_grad_norm) > 0.0, "")
    dtypes = (*DTYPES, EIGHT_BITS)
    allowed = ", ".join(str(dtype) for dtype in dtypes)
    holds = gradient_dtype is None or gradient_dtype in dtypes
    _check("gradient_dtype", gradient_dtype, f"None or one of {allowed}", holds, "")
    _check("scale", scale, 'one of "rms", "l1"', scale in ("rms", "l1"), "")
    power = isinstance(block_elements, int) and block_elements & (block_elements - 1) == 0
    _check(
        "block_elements", block_elements, "a power of two from 64 to 4096", power and 64 <= block_elements <= 4096, ""
    )
    big = isinstance(bucket_elements, int) and bucket_elements >= block_elements
    _check("bucket_elements", bucket_elements, f"an integer >= block_elements={block_elements}", big, "")
    for name, flag in flags.items():
        _check(name, flag, "True or False", isinstance(flag, bool), "")


def check_steps(name: str, steps: Any) -> None:
    """Check a number of warmup steps.

    Raises:
        ValueError: unless it is an integer of at least 1.
    """
    _check(name, steps, "an integer >= 1 (the number of warmup steps)", _is_count(steps), "")
