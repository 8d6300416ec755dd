"""Both backends replay the recorded runs of the old implementation, through the public API, over real processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from onebit_triton import OneBitLamb

from ..ranks import RankPool

DATA = Path(__file__).parents[1] / "data"
TOLERANCE = 2e-6

NAMES = ("even_w1", "even_w2", "even_w4")
"""Replayed by both backends; the run without weight decay by one, since the interpreter takes its time."""


def replay(rank: int, ranks: int, path: str, backend: str) -> dict[str, np.ndarray]:
    """Parameters and factors after every step of a recorded run, on one rank."""
    run = np.load(path)
    sizes = run["sizes"].tolist()
    params = [torch.nn.Parameter(piece.clone()) for piece in torch.from_numpy(run["init"]).split(sizes)]
    optimizer = OneBitLamb(
        params,
        lr=float(run["lr"]),
        freeze_step=int(run["freeze_step"]),
        betas=tuple(run["betas"].tolist()),
        eps=float(run["eps"]),
        weight_decay=float(run["weight_decay"]),
        max_coeff=float(run["max_coeff"]),
        min_coeff=float(run["min_coeff"]),
        coeff_beta=float(run["coeff_beta"]),
        coeff_bias_correction=False,
        factor_max=float(run["factor_max"]),
        factor_min=float(run["factor_min"]),
        factor_threshold=float(run["factor_threshold"]),
        block_elements=64,
        backend=backend,
    )
    seen: dict[str, list[np.ndarray]] = {"param": [], "factor": [], "coeff": [], "stage": []}
    for grads in run["grad"][:, rank]:
        for param, grad in zip(params, torch.from_numpy(grads).split(sizes), strict=True):
            param.grad = grad.clone()
        optimizer.step()
        metrics = optimizer.metrics()
        seen["param"].append(torch.cat([p.detach() for p in params]).numpy().copy())
        seen["factor"].append(np.array(metrics["factor"]))
        seen["coeff"].append(np.array(metrics["trust_ratio"]))
        seen["stage"].append(np.array(metrics["stage"] == "compression"))
    return {key: np.stack(values) for key, values in seen.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, backend) for name in NAMES for backend in ("torch", "triton")), ("even_w4_nowd", "torch")],
)
def test_replays_recorded_run(ranks: RankPool, name: str, backend: str) -> None:
    path = DATA / f"{name}.npz"
    run = np.load(path)
    n = run["grad"].shape[1]
    results = ranks(n, replay, str(path), backend)
    freeze = int(run["freeze_step"])
    for rank, seen in enumerate(results):
        worst = np.abs(seen["param"] - run["param"]).max()
        assert worst < TOLERANCE, f"rank {rank} is off by {worst}"
        np.testing.assert_array_equal(seen["param"], results[0]["param"])
        np.testing.assert_allclose(seen["coeff"], run["lamb_coeff"], rtol=1e-4)
        np.testing.assert_allclose(seen["factor"][freeze:], run["last_factor"][freeze:], rtol=1e-4)
        # The stage after step s is that of step s + 1.
        np.testing.assert_array_equal(seen["stage"], np.arange(1, len(run["param"]) + 1) >= freeze)
