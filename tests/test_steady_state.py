"""A step in the midst of a stage can be captured in a CUDA graph, and costs as many launches as there are buckets.

By construction, without a GPU: nothing is read on the host, nothing is allocated, and what is launched does not depend
on any value. benchmarks/gpu captures and replays for real.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from onebit_triton import OneBitLamb, hyperparameters
from onebit_triton.buckets import plan_layout
from onebit_triton.kernels.tables import Decision, Hyper

from .training import gradients, parameters, set_gradients, two_groups


def storages(values: Any) -> set[int]:
    """Addresses of the memory of all tensors in nested sequences."""
    if isinstance(values, Tensor):
        return {values.untyped_storage()._cdata}
    if isinstance(values, (list, tuple)):
        return set().union(*map(storages, values)) if values else set()
    return set()


class Recorder(TorchDispatchMode):
    """Records what runs on tensors; whatever returns new memory or a number is an error."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = func._schema.name
        if name.startswith("profiler::"):
            return result
        known = storages(args) | storages(tuple(kwargs.values()))
        assert not isinstance(result, (bool, int, float)), f"the host reads a tensor: {func}"
        if not name.startswith("c10d::"):
            assert storages(result) <= known, f"allocates: {func}"
        if not func.is_view:
            self.calls.append(name)
        return result


@contextmanager
def recorded(execute: bool = True) -> Iterator[list[str]]:
    """Records kernel launches by name and grid, and torch's operations but for views; kernels may be left out."""
    with Recorder() as recorder:
        run = interpreter.InterpretedFunction.run

        def record(self: Any, *args: Any, grid: tuple[int, ...], **options: Any) -> Any:
            recorder.calls.append(f"{self.fn.__name__}{grid}")
            if not execute:
                return None
            with torch.utils._python_dispatch._disable_current_modes():
                return run(self, *args, grid=grid, **options)

        with mock.patch.object(interpreter.InterpretedFunction, "run", record):
            yield recorder.calls


def test_recorder_finds_what_a_graph_cannot_repeat() -> None:
    x = torch.ones(3)
    with Recorder() as found:
        x.view(3, 1).add_(1)
        torch.mul(x, 2.0, out=x)
    assert found.calls == ["aten::add_", "aten::mul"]
    with pytest.raises(AssertionError, match="allocates"), Recorder():
        x + 1
    with pytest.raises(AssertionError, match="allocates"), Recorder():
        torch.empty(1)
    with pytest.raises(AssertionError, match="the host reads"), Recorder():
        float(x[0])


@pytest.mark.parametrize("stage", ["warmup", "compression"])
@pytest.mark.parametrize("n", [1, 2])
def test_steady_steps_can_be_captured(ranks: Any, n: int, stage: str) -> None:
    ranks(n, step_as_in_a_graph, stage)


def step_as_in_a_graph(rank: int, n: int, stage: str) -> None:
    """A rate on the device, gradients that stay where they are, a step that is skipped: the same calls each time."""
    with mock.patch.object(hyperparameters, "_on_device", lambda lr: isinstance(lr, Tensor)):
        params = parameters()
        lr = torch.tensor(0.01)
        optimizer = two_groups(
            params, backend="triton", lr=lr, freeze_step=2 if stage == "compression" else 100, max_grad_norm=0.1,
            bias_correction=True,
        )  # fmt: skip
        set_gradients(params, gradients(0, rank, params))
        for _ in range(4):
            optimizer.step()
        assert optimizer.stage == stage
        steps = []
        for step in range(3):
            for param, grad in zip(params, gradients(step, rank, params), strict=True):
                param.grad.copy_(grad)
            lr.mul_(0.5)
            if step == 1:
                params[0].grad[0] = float("nan")
            before = [p.detach().clone() for p in params]
            with recorded() as calls:
                optimizer.step()
            steps.append(calls)
            moved = [not torch.equal(p, q) for p, q in zip(params, before, strict=True)]
            assert moved == [step != 1] * len(params)
        assert steps[0] == steps[1] == steps[2]
        assert len(steps[0]) > 10


def bert_large(hidden: int, vocabulary: int) -> list[tuple[int, ...]]:
    """Shapes of BERT-Large's 398 tensors, pretraining heads included, with another width and vocabulary."""
    norm, wide = [(hidden,), (hidden,)], 4 * hidden
    square = [(hidden, hidden), (hidden,)]
    layer = [*square * 4, *norm, (wide, hidden), (wide,), (hidden, wide), (hidden,), *norm]
    return [
        (vocabulary, hidden), (512, hidden), (2, hidden), *norm, *layer * 24, *square, (vocabulary,), *square, *norm,
        (2, hidden), (2,),
    ]  # fmt: skip


def test_launches_depend_on_buckets_alone(ranks: Any) -> None:
    """BERT-Large's tensors, made narrow: at most 12 launches a bucket and 6 besides, torch's operations included."""
    shapes = bert_large(16, 488)
    assert len(shapes) == 398
    assert sum(torch.Size(shape).numel() for shape in bert_large(1024, 30522)) == pytest.approx(336.2e6, rel=1e-3)
    few, many, other = (
        ranks(2, count_launches, tensors, bucket_elements)[0]
        for tensors, bucket_elements in ((shapes, 2**18), (shapes, 2**16), (shapes[::4], 2**15))
    )
    for stage in ("warmup", "compression"):
        (calls, buckets), (more_calls, more_buckets) = few[stage], many[stage]
        assert 1 < buckets < more_buckets
        per_bucket = (more_calls - calls) / (more_buckets - buckets)
        besides = calls - per_bucket * buckets
        assert per_bucket <= 12, stage
        assert besides <= 6, stage
        assert other[stage][0] == besides + per_bucket * other[stage][1], stage


def count_launches(
    rank: int, n: int, shapes: list[tuple[int, ...]], bucket_elements: int
) -> dict[str, tuple[int, int]]:
    params = [torch.nn.Parameter(torch.full(shape, 0.1)) for shape in shapes]
    optimizer = OneBitLamb(params, freeze_step=3, backend="triton", bucket_elements=bucket_elements)
    buckets = len(plan_layout(params, 1024, bucket_elements, n).buckets)
    found = {}
    for param in params:
        param.grad = torch.ones_like(param)
    with mock.patch.object(interpreter.InterpretedFunction, "run", return_value=None):
        for step in range(5):
            stage = optimizer.stage
            if step in (1, 4):
                with recorded(execute=False) as calls:
                    optimizer.step()
                found[stage] = (len(calls), buckets)
            else:
                optimizer._replica.decision[Decision.COUNTED] = 3  # as the kernels would have
                optimizer.step()
    return found


def test_rate_on_the_device_that_becomes_a_number() -> None:
    with mock.patch.object(hyperparameters, "_on_device", lambda lr: isinstance(lr, Tensor)):
        params = parameters()
        groups = [{"params": params[:3], "lr": torch.tensor(0.5)}, {"params": params[3:], "lr": torch.tensor(0.25)}]
        optimizer = OneBitLamb(groups, backend="torch")
        set_gradients(params, gradients(0, 0, params))
        for first in (torch.tensor(0.5), 1.0):
            optimizer.param_groups[0]["lr"] = first
            optimizer.step()
            rates = optimizer._replica.hyper[:, Hyper.LR]
            assert rates.tolist() == [float(first)] * 3 + [0.25] * 3


def test_replays_count_when_the_warmup_is_due() -> None:
    """Replays, as the device sees them: it has counted steps that the host has not."""
    params = parameters()
    optimizer = OneBitLamb(params, freeze_step=6, backend="torch")
    set_gradients(params, gradients(0, 0, params))
    optimizer.step()
    optimizer._replayed = True
    optimizer._replica.decision[Decision.COUNTED] += 4
    assert optimizer.stage == "warmup"
    optimizer.step()
    assert optimizer.stage == "compression"
    with mock.patch.object(optimizer, "_count_replays", side_effect=AssertionError("reads the device")):
        optimizer.step()  # nothing is due any more
    assert optimizer.state_dict()["param_groups"][0]["onebit_lamb"]["calls"] == 7
