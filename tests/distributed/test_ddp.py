"""attach: DDP averages in warmup and leaves gradients local afterwards; what happens without it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from onebit_triton import OneBitLamb
from onebit_triton.kernels.tables import Roll

from ..ranks import RankPool
from ..training import gradients, logged, parameters, set_gradients, vector


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 40), torch.nn.BatchNorm1d(40), torch.nn.ReLU(), torch.nn.Linear(40, 3)
    )


def train(
    rank: int, ranks: int, mode: str, steps: int, micro: int = 1, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Train with DDP and attach ("attach"), DDP without it ("bare"), or neither ("plain")."""
    with logged() as records:
        net: torch.nn.Module = model()
        optimizer = OneBitLamb(
            net.parameters(), lr=0.02, freeze_step=4, backend="torch", block_elements=64, **(options or {})
        )
        if mode != "plain":
            net = DistributedDataParallel(net)
        if mode == "attach":
            assert optimizer.attach(net) is optimizer.attach(net) is net
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
        roll_call = n * len(Roll)
        assert seen["sent"][0] == pytest.approx(2 * (n - 1) / n * 4 * (seen["elements"] + roll_call), rel=0.01)
        assert seen["sent"][5] < seen["sent"][0] / 8
    switched = [line for line in results[0]["log"] if "compression begins" in line]
    assert len(switched) == 1
    assert f"{results[0]['sent'][0]:,} before, {results[0]['sent'][5]:,} after" in switched[0]
    assert not any(line for seen in results[1:] for line in seen["log"])


def test_attach_equals_own_averaging(ranks: RankPool) -> None:
    by_hook, by_us = ranks(2, train, "attach", 4)[0], ranks(2, train, "plain", 4)[0]
    np.testing.assert_allclose(by_hook["params"], by_us["params"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["attach", "plain"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_can_be_averaged_in_16_bits(ranks: RankPool, mode: str, dtype: torch.dtype) -> None:
    """Half the bytes in warmup and as many as ever in compression; the steps differ where gradients are near zero."""
    whole, half = (ranks(2, train, mode, 7, 1, options) for options in ({}, {"gradient_dtype": dtype}))
    np.testing.assert_array_equal(half[0]["params"], half[1]["params"])
    assert half[0]["sent"][5:] == whole[0]["sent"][5:]
    for few, many in zip(half[0]["sent"][:4], whole[0]["sent"][:4], strict=True):
        assert few == pytest.approx(many / 2, rel=0.01)
    whole, half = (ranks(2, train, mode, 4, 1, options) for options in ({}, {"gradient_dtype": dtype}))
    assert 0 < np.median(np.abs(half[0]["params"] - whole[0]["params"])) < 1e-4


def test_what_is_averaged_in_16_bits(ranks: RankPool) -> None:
    """Gradients are divided, rounded, then summed: LAMB on the result takes the very same steps."""
    dtype = torch.bfloat16
    params = parameters()
    optimizer = OneBitLamb(params, lr=0.01, freeze_step=9, backend="torch", block_elements=64)
    for step in range(4):
        halves = [[grad / 2 for grad in gradients(step, rank, params)] for rank in range(2)]
        set_gradients(params, [(a.to(dtype) + b.to(dtype)).float() for a, b in zip(*halves, strict=True)])
        optimizer.step()
    for seen in ranks(2, average_in, dtype):
        np.testing.assert_array_equal(seen, vector(params))


def average_in(rank: int, ranks: int, dtype: torch.dtype) -> np.ndarray:
    params = parameters()
    optimizer = OneBitLamb(
        params, lr=0.01, freeze_step=9, gradient_dtype=dtype, backend="torch", block_elements=64, bucket_elements=256
    )
    for step in range(4):
        set_gradients(params, gradients(step, rank, params))
        optimizer.step()
    return vector(params)


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
    results = ranks(2, train, "bare", 30)
    warnings = [line for line in results[0]["log"] if "attach" in line]
    assert len(warnings) == 1
    assert "equal on all ranks" in warnings[0]
    np.testing.assert_array_equal(results[0]["params"], results[1]["params"])


def test_no_warning_with_attach(ranks: RankPool) -> None:
    assert not [line for line in ranks(2, train, "attach", 30)[0]["log"] if "attach" in line]


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


class Branches(torch.nn.Module):
    """A model of which every step uses another part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = torch.nn.Linear(12, 24)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(24, 3) for _ in range(2))

    def forward(self, inputs: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.stem(inputs).tanh())


VARIANTS: dict[str, dict[str, Any]] = {
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "many buckets, rebuilt": {"bucket_cap_mb": 0.001},
}


def train_variant(rank: int, ranks: int, name: str) -> dict[str, Any]:
    """Train with options of DDP: losses of all steps, parameters, and bytes of each step."""
    net = Branches()
    optimizer = OneBitLamb(net.parameters(), lr=0.02, betas=(0.9, 0.9), freeze_step=8, block_elements=64)
    ddp = optimizer.attach(DistributedDataParallel(net, **VARIANTS[name]))
    data = torch.Generator().manual_seed(5 + rank)
    losses, sent = [], []
    for step in range(24):
        optimizer.zero_grad()
        loss = torch.zeros(())
        # Only with find_unused_parameters may a step leave a head out, and another one than the other rank.
        heads = [(step + rank) % 2] if name == "find_unused_parameters" else [0, 1]
        for head in heads:
            inputs = torch.randn(32, 12, generator=data)
            loss = loss + torch.nn.functional.cross_entropy(ddp(inputs, head), inputs[:, :3].argmax(1)) / len(heads)
            if name == "static_graph":
                break
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        sent.append(optimizer.metrics()["bytes_sent_last_step"])
    params = torch.cat([p.detach().reshape(-1) for p in net.parameters()]).numpy()
    return {"losses": losses, "params": params, "sent": sent, "stage": optimizer.stage}


@pytest.mark.parametrize("name", VARIANTS)
def test_options_of_ddp(ranks: RankPool, name: str) -> None:
    results = ranks(2, train_variant, name)
    np.testing.assert_array_equal(results[0]["params"], results[1]["params"])
    losses = np.mean([seen["losses"] for seen in results], 0)
    assert losses[-4:].mean() < losses[8:12].mean() < losses[:4].mean()
    assert results[0]["sent"][-1] < results[0]["sent"][1] / 8


def train_two_models(rank: int, ranks: int) -> dict[str, Any]:
    torch.manual_seed(0)
    encoder, decoder = torch.nn.Linear(12, 24), torch.nn.Linear(24, 12)
    optimizer = OneBitLamb([*encoder.parameters(), *decoder.parameters()], lr=0.02, betas=(0.9, 0.9), freeze_step=8)
    first, second = (optimizer.attach(DistributedDataParallel(net)) for net in (encoder, decoder))
    data = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(24):
        inputs = torch.randn(32, 12, generator=data)
        loss = (second(first(inputs).tanh()) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return {"losses": losses, "params": [p.detach().numpy() for p in (*encoder.parameters(), *decoder.parameters())]}


def test_two_models_under_one_optimizer(ranks: RankPool) -> None:
    results = ranks(2, train_two_models)
    for mine, theirs in zip(results[0]["params"], results[1]["params"], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    losses = np.mean([seen["losses"] for seen in results], 0)
    assert losses[-4:].mean() < losses[8:12].mean() < losses[:4].mean()


def drop_an_attached_model(rank: int, ranks: int) -> list[bool]:
    """Which of optimizer, hook and model are freed as soon as nobody uses them, and steps without the model go on."""
    group = torch.distributed.new_group(list(range(ranks)))
    net = torch.nn.Linear(12, 3)
    optimizer = OneBitLamb(net.parameters(), lr=0.02, freeze_step=3, backend="torch", process_group=group)
    ddp = optimizer.attach(DistributedDataParallel(net, process_group=group))
    seen = [weakref.ref(optimizer), weakref.ref(next(optimizer._hooks.values())), weakref.ref(ddp)]
    gc.collect()
    gc.disable()
    try:
        ddp(torch.full((2, 12), float(rank))).sum().backward()
        optimizer.step()
        del ddp
        gc.collect()  # a DistributedDataParallel refers to itself
        freed = [seen[1]() is None, seen[2]() is None]
        for _ in range(4):
            optimizer.step()
        freed.append(optimizer.stage == "compression")
        del optimizer
        freed.append(seen[0]() is None)
    finally:
        gc.enable()
    return freed


def test_the_optimizer_keeps_no_model_alive_and_nothing_keeps_the_optimizer(ranks: RankPool) -> None:
    for freed in ranks(2, drop_an_attached_model):
        assert freed == [True] * 4


def clip_by_hand(rank: int, ranks: int) -> list[str]:
    """What is logged when every rank clips its own gradients, in both stages."""
    with logged() as records:
        net = Branches()
        optimizer = OneBitLamb(net.parameters(), lr=0.02, freeze_step=5, backend="torch", block_elements=64)
        ddp = optimizer.attach(DistributedDataParallel(net))
        data = torch.Generator().manual_seed(rank)
        for step in range(32):
            optimizer.zero_grad()
            inputs = torch.randn(32, 12, generator=data)
            (100 * (ddp(inputs, 0) + ddp(inputs, 1) - inputs[:, :3]).square().sum()).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            if step == 4:
                assert not records[1:], "in warmup gradients are averaged, and clipping them is what it seems"
    return records


def test_clipping_by_ones_own_norm_warns_once_in_compression(ranks: RankPool) -> None:
    first, second = ranks(2, clip_by_hand)
    assert len([line for line in first if "clip_grad_norm_" in line and "max_grad_norm" in line]) == 1
    assert not second
