"""Bad input: each a clear error that names the argument, the rule and the value; the optimizer stays as it was."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from onebit_triton import OneBitLamb
from onebit_triton.kernels import backends

from .training import parameters

GROUP = [
    ({"lr": -0.1}, "Invalid lr=-0.1 in param group 0. Must be a finite number >= 0.0."),
    ({"lr": float("nan")}, "Invalid lr=nan in param group 0. Must be a finite number >= 0.0."),
    ({"lr": "fast"}, "Invalid lr='fast' in param group 0. Must be a finite number >= 0.0."),
    ({"lr": torch.ones(2)}, "Must be a number or a tensor of one element."),
    (
        {"betas": (0.9, 1.0)},
        "Invalid betas=(0.9, 1.0) in param group 0. Must be a pair of numbers, each in [0.0, 1.0).",
    ),
    ({"betas": (-0.1, 0.9)}, "Invalid betas=(-0.1, 0.9) in param group 0."),
    ({"betas": 0.9}, "Invalid betas=0.9 in param group 0. Must be a pair"),
    ({"eps": 0.0}, "Invalid eps=0.0 in param group 0. Must be a finite number > 0.0."),
    ({"weight_decay": -1}, "Invalid weight_decay=-1 in param group 0. Must be a finite number >= 0.0."),
    ({"min_coeff": 2.0, "max_coeff": 1.0}, "Invalid min_coeff=2.0 in param group 0. Must be <= max_coeff=1.0."),
    ({"max_coeff": float("inf")}, "Invalid max_coeff=inf in param group 0. Must be a finite number > 0.0."),
    ({"coeff_beta": 1.0}, "Invalid coeff_beta=1.0 in param group 0. Must be a number in [0.0, 1.0)."),
    ({"factor_min": 5.0}, "Invalid factor_min=5.0 in param group 0. Must be <= factor_max=4.0."),
    ({"max_rate_ratio": 0.0}, "Invalid max_rate_ratio=0.0 in param group 0. Must be a number > 0.0."),
    ({"max_rate_ratio": float("nan")}, "Invalid max_rate_ratio=nan in param group 0. Must be a number > 0.0."),
    ({"factor_max": 0.0}, "Invalid factor_max=0.0 in param group 0. Must be a finite number > 0.0."),
    ({"factor_threshold": 1.5}, "Invalid factor_threshold=1.5 in param group 0. Must be a number in [0.0, 1.0)."),
]
WHOLE = [
    ({"freeze_step": 0}, "Invalid freeze_step=0. Must be an integer >= 1"),
    ({"freeze_step": 1.5}, "Invalid freeze_step=1.5. Must be an integer >= 1"),
    ({"freeze_step": "soon"}, "Invalid freeze_step='soon'. Must be an integer >= 1 (the number of warmup steps), or"),
    ({"freeze_step": "auto"}, "Invalid max_freeze_step=None. Must be an integer >= 1 with freeze_step="),
    ({"freeze_step": "auto", "max_freeze_step": 0}, "Invalid max_freeze_step=0. Must be an integer >= 1 with"),
    ({"freeze_step": 9, "max_freeze_step": 9}, "Invalid max_freeze_step=9. Must be None, unless freeze_step is"),
    ({"max_grad_norm": 0.0}, "Invalid max_grad_norm=0.0. Must be None or a number > 0.0."),
    (
        {"gradient_dtype": torch.float64},
        "Invalid gradient_dtype=torch.float64. Must be None or one of torch.float32, torch.bfloat16, torch.float16, "
        "torch.float8_e4m3fn.",
    ),
    ({"gradient_dtype": "bf16"}, "Invalid gradient_dtype='bf16'. Must be None or one of torch.float32"),
    ({"max_skipped_steps": 0}, "Invalid max_skipped_steps=0. Must be an integer >= 1."),
    ({"check_replicas_every": 0}, "Invalid check_replicas_every=0. Must be None or an integer >= 1."),
    ({"block_elements": 100}, "Invalid block_elements=100. Must be a power of two from 64 to 4096."),
    ({"block_elements": 8192}, "Invalid block_elements=8192. Must be a power of two from 64 to 4096."),
    ({"block_elements": 32}, "Invalid block_elements=32. Must be a power of two from 64 to 4096."),
    ({"bucket_elements": 1}, "Invalid bucket_elements=1. Must be an integer >= block_elements=1024."),
    ({"bias_correction": "yes"}, "Invalid bias_correction='yes'. Must be True or False."),
    ({"coeff_bias_correction": None}, "Invalid coeff_bias_correction=None. Must be True or False."),
    ({"backend": "cuda"}, "Invalid backend='cuda'. Must be one of auto, triton, torch, inductor."),
    ({"process_group": "world"}, "Invalid process_group='world'. Must be a process group"),
]


@pytest.mark.parametrize(("options", "message"), GROUP + WHOLE)
def test_option_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        OneBitLamb(parameters(), **options)


@pytest.mark.parametrize(("options", "message"), GROUP)
def test_option_is_refused_in_a_later_group(options: dict[str, Any], message: str) -> None:
    optimizer = OneBitLamb(parameters(), backend="torch")
    with pytest.raises(ValueError, match=re.escape(message.replace("group 0", "group 1"))):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))], **options})
    assert len(optimizer.param_groups) == 1
    optimizer.step()


@pytest.mark.parametrize(("options", "message"), GROUP)
def test_option_is_refused_in_a_state_dict(options: dict[str, Any], message: str) -> None:
    optimizer = OneBitLamb(parameters(), backend="torch")
    state = optimizer.state_dict()
    state["param_groups"][0].update(options)
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_options_of_the_whole_optimizer_do_not_belong_in_groups() -> None:
    group = {"params": parameters(), "freeze_step": 3}
    with pytest.raises(ValueError, match=r"Invalid freeze_step=3 in param group 0. Must be given to the optimizer"):
        OneBitLamb([group])


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        (
            torch.ones(3, dtype=torch.complex64),
            "dtype must be one of torch.float32, torch.bfloat16, torch.float16, got",
        ),
        (torch.ones(3, dtype=torch.float64), "got torch.float64"),
        (torch.ones(3, dtype=torch.int32), "got torch.int32"),
        (torch.ones(3, 3).to_sparse(), "must be dense, got layout torch.sparse_coo"),
        (torch.ones(3, device="meta"), "all parameters must be on one device, got meta after cpu"),
        (
            torch.ones(4, 4)[:, ::2],
            "must fill its memory without gaps or overlaps, got shape (4, 2) with strides (4, 2)",
        ),
    ],
)
def test_parameter_is_refused(parameter: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^Invalid parameter 1 of group 0: .*{re.escape(message)}"):
        OneBitLamb([torch.nn.Parameter(torch.ones(2)), parameter])


def test_meta_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="Invalid parameter 0 of group 0: must hold data, got a meta tensor"):
        OneBitLamb([torch.nn.Parameter(torch.ones(2, device="meta"))])


def test_named_parameters_are_named() -> None:
    with pytest.raises(ValueError, match=r"Invalid parameter head\.weight: dtype"):
        OneBitLamb([("body", torch.nn.Parameter(torch.ones(2))), ("head.weight", torch.ones(2, dtype=torch.float64))])


def test_dtensor_is_refused(ranks: Any) -> None:
    ranks(1, build_with_dtensor)


def build_with_dtensor(rank: int, n: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    sharded = torch.nn.Parameter(distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (n,))))
    with pytest.raises(ValueError, match="DTensor parameters"):
        OneBitLamb([sharded], backend="torch")


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(5), "Invalid exp_avg_mask of shape (5,) in param group 0. Must be broadcastable"),
        (torch.ones(2, 4, 3), "Invalid exp_avg_mask of shape (2, 4, 3) in param group 0. Must be broadcastable"),
        ([1, 0], "Invalid exp_avg_mask in param group 0. Must be a tensor or None"),
    ],
)
def test_mask_is_refused(mask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        OneBitLamb([{"params": parameters(shapes=[(4, 3)]), "exp_avg_mask": mask}])


def test_no_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        OneBitLamb([])


def test_groups_without_parameters() -> None:
    with pytest.raises(ValueError, match="Invalid params: must contain at least one parameter"):
        OneBitLamb([{"params": []}])
    params = parameters()
    optimizer = OneBitLamb([{"params": []}, {"params": params}], freeze_step=1, backend="torch")
    for _ in range(3):
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


def test_triton_that_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "triton_available", lambda: False)
    with pytest.raises(ImportError, match=r"backend='triton' needs Triton, which is not installed"):
        OneBitLamb(parameters(), backend="triton")


def test_triton_on_a_cpu_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match=r"Invalid backend='triton' for parameters on cpu"):
        OneBitLamb(parameters(), backend="triton")


@pytest.mark.parametrize("gradient", [torch.ones(3, 3).to_sparse()])
def test_sparse_gradient_is_refused(gradient: torch.Tensor) -> None:
    parameter = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = OneBitLamb([parameter], backend="torch")
    parameter.grad = gradient
    with pytest.raises(RuntimeError, match="Invalid gradient of parameter 0 of group 0: must be dense"):
        optimizer.step()
    assert (parameter == 1).all()
