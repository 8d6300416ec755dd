"""A rank has a wrong value: a gradient, a hyperparameter, a message, a byte of a checkpoint. What every rank does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from onebit_triton.kernels.tables import HEADER_BYTES, Header

from .harness import SCRIPT, Cell, Harness, Outcome, Rank

pytestmark = pytest.mark.distributed

STEPS = {
    "first step": 1,
    "warmup": 3,
    "last step of the warmup": 4,
    "first compressed step": 5,
    "compression": 6,
    "re-warming": 11,
    "after a load": 13,
}
"""Operations of the script that are steps, by when they come."""
WARMUP = ("first step", "warmup", "last step of the warmup", "re-warming")
COMPRESSION = tuple(moment for moment in STEPS if moment not in WARMUP)


def multiply_gradient(factor: float, here: Rank) -> None:
    """In the next backward pass, before anything averages."""

    def hook(grad: torch.Tensor) -> torch.Tensor:
        handle.remove()
        return grad * factor

    handle = here.params[1].register_hook(hook)


def lose_gradient(here: Rank) -> None:
    here.params[2].grad = None


def misshape_gradient(here: Rank) -> None:
    here.params[2].grad.data = torch.ones(3, 3)


def change_lr(here: Rank) -> None:
    here.optimizer.param_groups[0]["lr"] = 0.0101


def spoil_message(phase: str, spoil: Callable[[torch.Tensor], None], here: Rank) -> None:
    """Change what arrives from rank 0 for the second bucket, in the next exchange of a phase."""
    exchange = here.optimizer._stage.exchange
    name = "send_to_servers" if phase == "to a server" else "send_to_workers"
    real = getattr(exchange, name)

    def send(bucket: int) -> Any:
        work = real(bucket)
        if bucket == 1:
            delattr(exchange, name)
            wait = work.wait

            def then() -> None:
                wait()
                spoil((exchange.received if phase == "to a server" else exchange.messages)[bucket][0])

            work.wait = then
        return work

    setattr(exchange, name, send)


def flip_header(message: torch.Tensor) -> None:
    message.view(torch.int32)[Header.SCALE] ^= 1 << 22


def cut_short(message: torch.Tensor) -> None:
    message[HEADER_BYTES + 3 :] = 0


def make_stale(message: torch.Tensor) -> None:
    """As it was a step before; its words add up."""
    words = message.view(torch.int32)
    words[Header.STEP] -= 1
    words[Header.CHECK] += 1


def damage_checkpoint(here: Rank) -> None:
    state = here.optimizer.state_dict()
    state["state"][0]["exp_avg"].view(-1).view(torch.uint8)[7] ^= 1
    here.optimizer.state_dict = lambda: state


def run(cells: Harness, moments: Any, fault: Callable[[Rank], None], doing: str, **options: Any) -> Any:
    """Let a fault strike in a step at each of these moments; (operation, outcomes, undisturbed history) of each."""
    table = [Cell(fault, STEPS[moment], doing, **options) for moment in moments]
    for cell, (outcomes, _) in zip(table, cells(table), strict=True):
        yield cell.operation, outcomes, cells.calm(cell.ddp)


def check_raised(operation: int, outcomes: list[Outcome], told: list[str]) -> None:
    """Every rank has raised in this operation, which has changed nothing."""
    for outcome, text in zip(outcomes, told, strict=True):
        assert outcome.ended == "raised", outcome
        assert text in outcome.error, outcome.error
        assert len(outcome.history) == operation
        np.testing.assert_array_equal(outcome.params, outcome.history[-1])
        np.testing.assert_array_equal(outcome.params, outcomes[0].params)


@pytest.mark.parametrize("ddp", [False, True], ids=["own averages", "DDP"])
@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(cells: Harness, factor: float, ddp: bool) -> None:
    for operation, outcomes, calm in run(cells, STEPS, partial(multiply_gradient, factor), "before step", ddp=ddp):
        for outcome in outcomes:
            assert outcome.ended == "finished", outcome
            np.testing.assert_array_equal(outcome.history, outcomes[0].history)
            np.testing.assert_array_equal(outcome.history[:operation], calm[:operation])
            np.testing.assert_array_equal(outcome.history[operation], outcome.history[operation - 1])
            if operation < len(SCRIPT) - 1:
                assert (outcome.history[-1] != outcome.history[operation]).any(), "training goes on"


def test_a_missing_gradient_counts_as_zero(cells: Harness) -> None:
    for operation, outcomes, calm in run(cells, STEPS, lose_gradient, "gradients"):
        for outcome in outcomes:
            assert outcome.ended == "finished", outcome
            np.testing.assert_array_equal(outcome.history, outcomes[0].history)
            np.testing.assert_array_equal(outcome.history[:operation], calm[:operation])
            assert (outcome.history[operation] != outcome.history[operation - 1]).any()
            assert (outcome.history[operation] != calm[operation]).any()


def test_a_gradient_that_cannot_be_used_skips_the_step_and_all_ranks_raise(cells: Harness) -> None:
    theirs = "rank 1 could not take this step"
    for operation, outcomes, _ in run(cells, STEPS, misshape_gradient, "gradients"):
        check_raised(
            operation,
            outcomes,
            [theirs, "Invalid gradient of parameter 2.weight: must have shape (4, 30), got (3, 3)", theirs],
        )


@pytest.mark.parametrize("ddp", [False, True], ids=["own averages", "DDP"])
def test_another_learning_rate_skips_the_step_and_all_ranks_raise(cells: Harness, ddp: bool) -> None:
    told = "lr of param group 0: rank 1 has 0.0101, rank 0 has 0.01"
    for operation, outcomes, _ in run(cells, STEPS, change_lr, "before step", ddp=ddp):
        check_raised(operation, outcomes, [told] * 3)


@pytest.mark.parametrize("spoil", [flip_header, cut_short, make_stale])
def test_a_message_that_changed_on_its_way_to_a_server(cells: Harness, spoil: Callable[[torch.Tensor], None]) -> None:
    told = "a message from rank 0 was corrupted on its way"
    if spoil is make_stale:
        told = "rank 1 had others in this step than rank 0 had"
    for operation, outcomes, _ in run(cells, COMPRESSION, partial(spoil_message, "to a server", spoil), "before step"):
        check_raised(operation, outcomes, [told] * 3)


@pytest.mark.parametrize("spoil", [flip_header, cut_short, make_stale])
def test_a_message_that_changed_on_its_way_back(cells: Harness, spoil: Callable[[torch.Tensor], None]) -> None:
    """Others have applied the step. All learn of it in the next, or when replicas are compared."""
    moments = ("first compressed step", "compression")
    for operation, outcomes, _ in run(cells, moments, partial(spoil_message, "back", spoil), "before step"):
        told = "rank 1 received a corrupted message in the last step"
        if SCRIPT[operation + 1] != "step":
            told = "of rank 1 is not that of rank 0"
        for outcome in outcomes:
            assert outcome.ended == "raised", outcome
            assert told in outcome.error or SCRIPT[operation + 1] == "save", outcome.error
            assert "rank 1" in outcome.error, outcome.error


def test_a_damaged_checkpoint_is_refused_by_all_ranks(cells: Harness) -> None:
    cell = Cell(damage_checkpoint, SCRIPT.index("load"), "before load")
    ((outcomes, _),) = cells([cell])
    theirs = "Rank 1 failed to load its state_dict"
    own = "ValueError: Invalid state_dict: its tensors are not those that were saved"
    check_raised(cell.operation, outcomes, [theirs, own, theirs])
