"""What ranks must agree on in every step, and what is done about messages that are corrupted or stale: no rank applies
the step, and all raise after it, naming the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from onebit_triton import OneBitLamb
from onebit_triton.collectives import CompressedAllReduce
from onebit_triton.kernels.planes_reference import balance, header
from onebit_triton.kernels.tables import HEADER_BYTES, Header

from ..ranks import RankPool
from ..training import gradients, parameters, set_gradients, two_groups, vector

FREEZE_STEP, ODD = 4, 1
MOMENTS = {"warmup": 2, "last of the warmup": FREEZE_STEP - 1, "first compressed": FREEZE_STEP, "compression": 6}


def change_lr(optimizer: OneBitLamb, params: list[Any]) -> None:
    optimizer.param_groups[1]["lr"] *= 1.001


def change_betas(optimizer: OneBitLamb, params: list[Any]) -> None:
    optimizer.param_groups[0]["betas"] = (0.7, 0.9501)


def freeze_parameter(optimizer: OneBitLamb, params: list[Any]) -> None:
    params[4].requires_grad = False


def change_bound(optimizer: OneBitLamb, params: list[Any]) -> None:
    optimizer.param_groups[1]["factor_max"] = 3.0


CHANGES: dict[str, tuple[Callable[[OneBitLamb, list[Any]], None], str]] = {
    "lr": (change_lr, "lr of param group 1: rank 1 has 0.003003, rank 0 has 0.003"),
    "betas": (change_betas, "beta2 of param group 0: rank 1 has 0.9501, rank 0 has 0.95"),
    "factor_max": (change_bound, "factor_max of param group 1: rank 1 has 3, rank 0 has 4"),
    "requires_grad": (freeze_parameter, "requires_grad of the parameters of group 1: rank 1 has 5, rank 0 has 7"),
}


def differ(rank: int, ranks: int, at: int, what: str, backend: str) -> str:
    """Change something on one rank before a step; what was raised there. Parameters stay, and training can go on."""
    params = parameters()
    optimizer = two_groups(params, backend=backend, freeze_step=FREEZE_STEP)
    change, _ = CHANGES[what]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for step in range(at):
        set_gradients(params, gradients(step, rank, params))
        optimizer.step()
    before = vector(params)
    if rank == ODD:
        change(optimizer, params)
    set_gradients(params, gradients(at, rank, params))
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    np.testing.assert_array_equal(vector(params), before)
    for group, old in zip(optimizer.param_groups, groups, strict=True):
        group.update(old)
    for param in params:
        param.requires_grad = True
    for step in range(at, at + 3):
        set_gradients(params, gradients(step, rank, params))
        optimizer.step()
    optimizer.check_replicas()
    assert not np.array_equal(vector(params), before)
    return str(raised.value)


@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize(
    ("moment", "what"), [*zip(MOMENTS, CHANGES, strict=True), ("compression", "lr"), ("warmup", "betas")]
)
def test_a_rank_with_other_hyperparameters_is_named(ranks: RankPool, moment: str, what: str, backend: str) -> None:
    for rank, told in enumerate(ranks(3, differ, MOMENTS[moment], what, backend)):
        assert told.startswith(f"Rank {rank}: No rank has applied this step: ranks do not agree on hyperparameters")
        assert CHANGES[what][1] in told


def differ_under_ddp(rank: int, ranks: int, at: int, leave_out: bool) -> tuple[str, list[int]]:
    """One rank's scheduler, or its count of steps, is off under DDP; and what collectives the good steps took."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(9, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    optimizer = OneBitLamb(model.parameters(), lr=0.01, freeze_step=FREEZE_STEP, backend="torch", block_elements=64)
    ddp = optimizer.attach(DistributedDataParallel(model))
    calls = []
    inputs = torch.randn(20, 5, 9, generator=torch.Generator().manual_seed(rank))

    def step(number: int) -> None:
        ddp(inputs[number]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(at):
        with mock.patch.object(torch.distributed, "all_reduce", wraps=torch.distributed.all_reduce) as reduced:
            step(number)
        calls.append(reduced.call_count)
    if rank == ODD:
        if leave_out:
            ddp(inputs[at]).square().mean().backward()
            optimizer.zero_grad()
        else:
            optimizer.param_groups[0]["lr"] = 0.02
    elif leave_out:
        step(at)
    before = vector(list(model.parameters()))
    with pytest.raises(RuntimeError) as raised:
        step(at + 1)
    np.testing.assert_array_equal(vector(list(model.parameters())), before)
    return str(raised.value), calls


@pytest.mark.parametrize(
    ("at", "leave_out"),
    # In compression a step that was left out cannot be told from a late one: ranks meet in the next exchange.
    [(2, False), (2, True), (6, False)],
    ids=["lr in warmup", "a step left out in warmup", "lr in compression"],
)
def test_ranks_that_differ_under_ddp_are_named(ranks: RankPool, at: int, leave_out: bool) -> None:
    for told, calls in ranks(3, differ_under_ddp, at, leave_out):
        assert calls == [1] * min(at, FREEZE_STEP) + [0] * (at - FREEZE_STEP), "agreeing takes no collective of its own"
        if leave_out:
            assert f"the number of steps: rank 1 has {at + 1}, rank 0 has {at + 2}" in told
        else:
            assert "lr of param group 0: rank 1 has 0.02, rank 0 has 0.01" in told


def fail_one_rank(rank: int, ranks: int, at: int, options: dict[str, Any]) -> str:
    """A gradient of one rank cannot be used: all skip, and go on with a better one."""
    params = parameters()
    optimizer = two_groups(params, backend="torch", freeze_step=FREEZE_STEP, **options)
    for step in range(at):
        set_gradients(params, gradients(step, rank, params))
        optimizer.step()
    before = vector(params)
    set_gradients(params, gradients(at, rank, params))
    if rank == ODD:
        params[0].grad = params[0].grad.to_sparse()
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    np.testing.assert_array_equal(vector(params), before)
    for step in range(at, at + 3):
        set_gradients(params, gradients(step, rank, params))
        optimizer.step()
    assert optimizer.metrics()["skipped_steps"] == 1
    optimizer.check_replicas()
    return str(raised.value)


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}], ids=["plain", "clipping"])
@pytest.mark.parametrize("at", MOMENTS.values(), ids=MOMENTS)
def test_a_rank_that_cannot_take_a_step_lets_all_skip_it(ranks: RankPool, at: int, options: dict[str, Any]) -> None:
    first, odd, third = ranks(3, fail_one_rank, at, options)
    assert "sparse" in odd
    for told in (first, third):
        assert "rank 1 could not take this step; its own error message says why" in told


def on_the_way(rank: int, ranks: int, at: int, phase: str, damage: str, bucket: int) -> dict[str, Any]:
    """Damage one message from rank 0 as it arrives at rank 1, in one of the exchanges of a step."""
    params = parameters()
    optimizer = two_groups(params, backend="torch", freeze_step=2, bucket_elements=128)
    old: list[torch.Tensor] = []
    for step in range(at - 1):
        set_gradients(params, gradients(step, rank, params))
        optimizer.step()
    exchange = optimizer._stage.exchange  # type: ignore[union-attr]
    assert len(exchange.server) > 2

    def spoil(messages: torch.Tensor) -> None:
        if rank != ODD:
            return
        words = messages.view(torch.int32)
        if damage == "header":
            words[0, Header.SQUARES] ^= 1 << 9
        elif damage == "scale":
            words[0, Header.SCALE] ^= 1 << 30
        elif damage == "cut":
            messages[0, HEADER_BYTES + 5 :] = 0
        elif damage == "stale":
            messages[0].copy_(old[0])
        else:
            header(messages, Header.SENDER)[0] = 2
            balance(messages)

    name = "send_to_servers" if phase == "workers" else "send_to_workers"
    real = getattr(CompressedAllReduce, name)
    watched: list[bool] = []

    def send(self: CompressedAllReduce, number: int) -> Any:
        work, wait = real(self, number), None
        if number == bucket:
            wait = work.wait
            arrived = (self.received if phase == "workers" else self.messages)[bucket]

            def then() -> None:
                wait()
                if watched:
                    spoil(arrived)
                else:
                    old.append(arrived[0].clone())

            work.wait = then  # type: ignore[method-assign]
        return work

    told = []
    with mock.patch.object(CompressedAllReduce, name, send):
        for step in range(at - 1, at + 2):
            before = vector(params)
            set_gradients(params, gradients(step, rank, params))
            if step == at:
                watched.append(True)
            try:
                optimizer.step()
                told.append("")
            except RuntimeError as error:
                told.append(str(error))
                np.testing.assert_array_equal(vector(params), before)
            watched.clear()
    apart = ""
    try:
        optimizer.check_replicas()
    except RuntimeError as error:
        apart = str(error)
    optimizer.check_replicas(repair=True)
    for step in range(3):
        set_gradients(params, gradients(step, rank, params))
        optimizer.step()
    optimizer.check_replicas()
    return {"told": told, "apart": apart}


@pytest.mark.parametrize("damage", ["header", "scale", "cut", "stale", "misrouted"])
@pytest.mark.parametrize("bucket", [0, 1])
def test_a_message_that_changed_on_its_way_to_a_server_is_noticed(ranks: RankPool, damage: str, bucket: int) -> None:
    """Its receiver alone sees it, and tells all before anything is applied."""
    for seen in ranks(3, on_the_way, 4, "workers", damage, bucket):
        good, bad, after = seen["told"]
        assert (good, after, seen["apart"]) == ("", "", "")
        if damage == "stale":
            assert "rank 1 had others in this step than rank 0 had" in bad
        else:
            assert "a message from rank 0 was corrupted on its way" in bad


@pytest.mark.parametrize("damage", ["header", "scale", "cut", "stale", "misrouted"])
@pytest.mark.parametrize("bucket", [0, 1])
def test_a_message_that_changed_on_its_way_back_is_noticed(ranks: RankPool, damage: str, bucket: int) -> None:
    """Its receiver has lost the step that others apply: all are told in the next one, and can mend it."""
    for seen in ranks(3, on_the_way, 4, "servers", damage, bucket):
        good, bad, after = seen["told"]
        assert (good, bad) == ("", "")
        assert "rank 1 received a corrupted message in the last step" in after
        assert "of rank 1 is not that of rank 0" in seen["apart"]
