"""attach: DDP averages in warmup and leaves gradients local afterwards; what happens without it."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from onebit_triton import OneBitLamb

from ..ranks import RankPool


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 40), torch.nn.BatchNorm1d(40), torch.nn.ReLU(), torch.nn.Linear(40, 3)
    )


def train(
    rank: int, ranks: int, mode: str, steps: int, micro: int = 1, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train with DDP and attach ("attach"), DDP without it ("bare"), or neither ("plain")."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("onebit_triton")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    net: torch.nn.Module = model()
    optimizer = OneBitLamb(
        net.parameters(), lr=0.02, freeze_step=4, backend="torch", block_elements=64, **(options or {})
    )
    if mode != "plain":
        net = DistributedDataParallel(net)
    if mode == "attach":
        assert optimizer.attach(net) is net
    data = torch.Generator().manual_seed(5 + rank)
    alike, sent = [], []
    for _ in range(steps):
        optimizer.zero_grad()
        for part in range(micro):
            inputs, targets = torch.randn(16, 12, generator=data), torch.randint(0, 3, (16,), generator=data)
            last = part == micro - 1
            with net.no_sync() if mode != "plain" and not last else torch.enable_grad():
                torch.nn.functional.cross_entropy(net(inputs), targets).backward()
        grads = [torch.zeros_like(p.grad) for p in net.parameters() for _ in range(ranks)]
        torch.distributed.all_gather(grads[:ranks], next(iter(net.parameters())).grad)
        alike.append(all(torch.equal(grads[0], g) for g in grads[:ranks]))
        optimizer.step()
        sent.append(optimizer.metrics()["bytes_sent_last_step"])
    logger.removeHandler(handler)
    return {
        "params": torch.cat([p.detach().reshape(-1) for p in net.parameters()]).numpy(),
        "buffers": torch.cat([b.reshape(-1).float() for b in net.buffers()]).numpy(),
        "alike": alike, "log": records, "sent": sent, "stage": optimizer.stage,
        "elements": optimizer.metrics()["elements"],
    }  # fmt: skip


def test_attach_averages_then_leaves_gradients_local(ranks: RankPool) -> None:
    n = 3
    results = ranks(n, train, "attach", 12)
    for seen in results:
        np.testing.assert_array_equal(seen["params"], results[0]["params"])
        assert seen["alike"] == [True] * 4 + [False] * 8
        # DDP's own traffic in warmup, as a ring sends it, and nothing of ours beside it.
        assert seen["sent"][0] == pytest.approx(2 * (n - 1) / n * 4 * seen["elements"], rel=0.01)
        assert seen["sent"][5] < seen["sent"][0] / 8
    switched = [line for line in results[0]["log"] if "compression begins" in line]
    assert len(switched) == 1
    assert f"{results[0]['sent'][0]:,} before, {results[0]['sent'][5]:,} after" in switched[0]
    assert not any(line for seen in results[1:] for line in seen["log"])


def test_attach_equals_own_averaging(ranks: RankPool) -> None:
    by_hook, by_us = ranks(2, train, "attach", 4)[0], ranks(2, train, "plain", 4)[0]
    np.testing.assert_allclose(by_hook["params"], by_us["params"], rtol=0, atol=1e-6)


def test_accumulation_under_no_sync(ranks: RankPool) -> None:
    results = ranks(2, train, "attach", 10, 3)
    np.testing.assert_array_equal(results[0]["params"], results[1]["params"])
    assert results[0]["alike"] == [True] * 4 + [False] * 6


def test_batch_norm_buffers_are_still_broadcast(ranks: RankPool) -> None:
    """DDP broadcasts rank 0's buffers in every forward pass, so they differ by one forward pass at the most."""
    results = ranks(2, buffers_before_last_update, 12)
    np.testing.assert_array_equal(results[0], results[1])


def buffers_before_last_update(rank: int, ranks: int, steps: int) -> np.ndarray:
    net = model()
    optimizer = OneBitLamb(net.parameters(), lr=0.02, freeze_step=4, backend="torch")
    ddp = optimizer.attach(DistributedDataParallel(net))
    data = torch.Generator().manual_seed(5 + rank)
    seen = None
    net[0].register_forward_hook(lambda *_: seen_buffers.append(net[1].running_mean.clone()))
    seen_buffers: list[torch.Tensor] = []
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(16, 12, generator=data)).square().mean().backward()
        optimizer.step()
    seen = torch.stack(seen_buffers).numpy()
    return seen


def test_ddp_without_attach_warns_once(ranks: RankPool) -> None:
    results = ranks(2, train, "bare", 12)
    warnings = [line for line in results[0]["log"] if "attach" in line]
    assert len(warnings) == 1
    assert "equal on all ranks" in warnings[0]
    np.testing.assert_array_equal(results[0]["params"], results[1]["params"])


def test_no_warning_with_attach(ranks: RankPool) -> None:
    assert not [line for line in ranks(2, train, "attach", 12)[0]["log"] if "attach" in line]


def test_clipping_uses_what_the_hook_measured(ranks: RankPool) -> None:
    options = {"max_grad_norm": 0.05}
    by_hook, by_us = (ranks(2, train, mode, 12, 1, options) for mode in ("attach", "plain"))
    np.testing.assert_array_equal(by_hook[0]["params"], by_hook[1]["params"])
    np.testing.assert_allclose(by_hook[0]["params"], by_us[0]["params"], rtol=0, atol=1e-5)
    assert not np.allclose(by_hook[0]["params"], ranks(2, train, "attach", 12)[0]["params"], atol=1e-5)


def misuse(rank: int, ranks: int) -> None:
    net = model()
    optimizer = OneBitLamb(net.parameters(), backend="torch")
    with pytest.raises(TypeError, match=r"Must be a torch\.nn\.parallel\.DistributedDataParallel"):
        optimizer.attach(net)
    alone = [torch.distributed.new_group([r]) for r in range(ranks)][rank]
    with pytest.raises(ValueError, match=rf"its process group has ranks \[{rank}\]"):
        optimizer.attach(DistributedDataParallel(net, process_group=alone))


def test_attach_refuses_what_it_cannot_use(ranks: RankPool) -> None:
    ranks(2, misuse)


def half_attached(rank: int, ranks: int) -> None:
    net, other = model(), torch.nn.Linear(3, 3)
    optimizer = OneBitLamb([*net.parameters(), *other.parameters()], backend="torch")
    ddp = optimizer.attach(DistributedDataParallel(net))
    other(ddp(torch.randn(4, 12))).sum().backward()
    with pytest.raises(RuntimeError, match="belongs to no attached model"):
        optimizer.step()


def test_parameters_outside_attached_models_are_refused(ranks: RankPool) -> None:
    ranks(2, half_attached)
