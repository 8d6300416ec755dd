"""Ranks in one process give what processes give, and the methods that are compared are what they are called."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.convergence import __main__ as command
from benchmarks.convergence import experiments, report
from benchmarks.convergence.experiments import Settings
from benchmarks.convergence.local_ranks import LocalRanks, Replicas
from benchmarks.convergence.methods import METHODS, Cast, PowerSGD
from onebit_triton import optimizer
from onebit_triton.collectives import Communicator

from .ranks import RankPool
from .training import gradients, parameters, set_gradients, two_groups, vector

STEPS, FREEZE = 14, 5


def on_a_grid(step: int, rank: int, params: list[Any]) -> list[torch.Tensor]:
    """Gradients whose sum over ranks is exact, in whatever order a library adds them up."""
    return [grad.mul(2**16).round().div(2**16) for grad in gradients(step, rank, params)]


def train_processes(rank: int, ranks: int) -> tuple[np.ndarray, dict[str, int]]:
    params = parameters()
    optimizer = two_groups(params, freeze_step=FREEZE, max_grad_norm=0.3)
    for step in range(STEPS):
        set_gradients(params, on_a_grid(step, rank, params))
        optimizer.step()
    return vector(params), optimizer.bytes_sent


@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 4])
def test_local_ranks_train_as_processes_do_bit_for_bit(ranks: RankPool, world: int) -> None:
    params = parameters()
    replicas = Replicas(params, world, lambda own: two_groups(own, freeze_step=FREEZE, max_grad_norm=0.3))
    for step in range(STEPS):
        replicas.step([on_a_grid(step, rank, params) for rank in range(world)])
    assert replicas.optimizers[0].stage == "compression"
    assert optimizer.Communicator is Communicator, "nothing is left behind"
    for found, sent in ranks(world, train_processes):
        np.testing.assert_array_equal(found, vector(params))
        assert sent == replicas.optimizers[0].bytes_sent
    for replica in replicas.optimizers[1:]:
        own = [p for group in replica.param_groups for p in group["params"]]
        np.testing.assert_array_equal(vector(own), vector(params))


def test_the_error_of_a_local_rank_ends_them_all() -> None:
    group = LocalRanks(3)

    def fail(rank: int) -> None:
        group.exchange(rank, rank, lambda brought: None)
        if rank == 1:
            raise ValueError("as it must")
        group.exchange(rank, rank, lambda brought: None)

    with pytest.raises(ValueError, match="as it must"):
        group.run(fail)
    assert group.run(lambda rank: rank) == [0, 1, 2]


def test_casting_averages_as_ddp_does() -> None:
    grads = [[torch.randn(40, generator=torch.Generator().manual_seed(rank))] for rank in range(4)]
    (exact,), (half,) = Cast(torch.float32)(grads), Cast(torch.float16)(grads)
    torch.testing.assert_close(exact, torch.stack([g for (g,) in grads]).mean(0))
    assert 0 < (half - exact).abs().max() < 2e-3
    assert Cast(torch.float16).sent([exact], 4) == 40 * 2 * 2 * 3 // 4


START = 2
"""Steps before PowerSGD begins in torch's hook, which it needs."""


def directions(rank: int) -> list[torch.Tensor]:
    """Gradients of a matrix in some steps: close to low rank, and noise."""
    generator = torch.Generator().manual_seed(rank)
    low = torch.randn(32, 3, generator=generator) @ torch.randn(3, 24, generator=generator)
    return [low + 0.1 * torch.randn(32, 24, generator=generator) for _ in range(START + 4)]


def low_rank_by_torch(rank: int, ranks: int, q: np.ndarray) -> np.ndarray:
    linear = torch.nn.Linear(24, 32, bias=False)
    model = DistributedDataParallel(linear)
    state = PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=START)
    state.p_memory_dict[0], state.q_memory_dict[0] = torch.empty(32 * 4), torch.from_numpy(q).view(-1).clone()
    model.register_comm_hook(state, powerSGD_hook)
    averages = []
    for direction in directions(rank):
        model.zero_grad()
        (model(torch.eye(24)) * direction.T).sum().backward()
        assert linear.weight.grad is not None
        averages.append(linear.weight.grad.clone().numpy())
    return np.stack(averages[START:])


@pytest.mark.distributed
def test_power_sgd_is_that_of_torch(ranks: RankPool) -> None:
    q = torch.randn(24, 4, generator=torch.Generator().manual_seed(7))
    average = PowerSGD(4)
    average._q[0] = q.clone()
    per_step = zip(*(directions(rank)[START:] for rank in range(2)), strict=True)
    ours = [average([[grad] for grad in grads])[0] for grads in per_step]
    for theirs in ranks(2, low_rank_by_torch, q.numpy()):
        np.testing.assert_allclose(torch.stack(ours).numpy(), theirs, rtol=1e-3, atol=1e-4)
    assert average.sent([torch.empty(32, 24), torch.empty(5)], 2) == 4 * ((32 + 24) * 4 + 5)


SETTINGS = """
seeds = [0, 1]
tuning_seeds = [100]
backend = "torch"
looks = 2
[tasks.digits-cnn]
steps = 6
ramp = 2
rates = [0.01, 1e6]
"""


ROWS = [method for method in METHODS for _ in range(3 if method == "onebit" else 1)]
"""Rows of a comparison: 1-bit LAMB has three, with two fixed warmups and with one that ends by itself."""


@pytest.mark.slow
def test_a_tiny_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Tuned, trained, tabulated and drawn; and what is there is not trained again."""
    (tmp_path / "settings.toml").write_text(SETTINGS)
    words = ["", "compare", "--tasks", "digits-cnn", "--workers", "1", "--settings", f"{tmp_path}/settings.toml"]
    monkeypatch.setattr("sys.argv", [*words, f"--results={tmp_path}/results", f"--output={tmp_path}/out"])
    command.main()
    printed = capsys.readouterr().out
    rows = [line.split(" | ") for line in printed.splitlines() if line.startswith("| ") and "lr 0.01" in line]
    assert [row[0].split(",")[0] for row in rows] == [f"| {method}" for method in ROWS], "the better rate is taken"
    assert [row[4] for row in rows] == ["never", "never", "never", "1", "2", "2", "1"]
    assert all(row[5] == "2 |" and "±" in row[1] for row in rows)
    assert rows[0][2] == "0.0"
    less = [float(row[3].split()[0]) for row in rows]
    assert less[:2] == [0.5, 1.0]
    assert less[3] == less[6] > 1.5
    assert less[5] > less[3] > less[4] > less[1], "the shortest warmup, but for gradients in 8 bits"
    assert (tmp_path / "out" / "compare-digits-cnn.md").read_text() in printed
    assert (tmp_path / "out" / "compare-digits-cnn.png").stat().st_size > 10_000
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    assert len(files) == 2 + 2 * len(ROWS)
    result = json.loads(next(path for path in files if "/onebit-freeze_step=1" in str(path)).read_text())
    assert [point["step"] for point in result["held_out"]] == [0, 3, 6]
    assert not result["diverged"]
    command.main()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")} == files


SMALL = Path(command.__file__).with_name("small.toml")


def run_band(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    words = ["", "band", "--workers", "1", "--settings", str(SMALL)]
    monkeypatch.setattr("sys.argv", [*words, f"--results={folder}/results", f"--output={folder}/out"])
    command.main()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_onebit_lamb_stays_in_lambs_band(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three seeds of the byte transformer."""
    run_band(monkeypatch, tmp_path)
    results = [json.loads(path.read_text()) for path in (tmp_path / "results").rglob("*.json")]
    assert sorted(result["switched"] or 0 for result in results) == [0] * 3 + [60] * 3
    assert all(report.score(result) < 2.7 < result["losses"][0] for result in results)


@pytest.mark.parametrize(
    ("scores", "leaves"),
    [((2.53, 2.57, 2.55), False), ((2.59, 2.60, 2.57), True), ((2.5, float("nan"), 2.5), True)],
)
def test_leaving_the_band_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scores: tuple[float, ...], leaves: bool
) -> None:
    """Judged from results that are there already. LAMB has 2.53, 2.54 and 2.55: a standard deviation of 0.01."""
    for run in experiments.band(Settings.read(SMALL), "byte-lm", 0.016):
        loss = (2.53, 2.54, 2.55)[run.seed] if run.method == "lamb" else scores[run.seed]
        result = {
            "run": asdict(run), "losses": [5.5, loss], "diverged": loss != loss, "switched": None, "parameters": 100,
            "held_out": [{"step": step, "bytes": 100, "loss": loss} for step in (0, 1)],
        }  # fmt: skip
        path = tmp_path / "results" / f"{run.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result))
    with pytest.raises(SystemExit, match="Not in LAMB's band") if leaves else nullcontext():
        run_band(monkeypatch, tmp_path)


@pytest.mark.parametrize("path", sorted(SMALL.parent.glob("*.toml")), ids=lambda path: path.stem)
def test_every_experiment_is_planned(path: Path) -> None:
    """From every file of settings, for every task; no training twice in one experiment."""
    settings = Settings.read(path)
    for task in settings.tasks:
        tuned = (experiments.comparison, experiments.traffic, experiments.freezing, experiments.band)
        for runs in (
            experiments.tuning(settings, task),
            experiments.robustness(settings, task),
            *(plan(settings, task, 0.01) for plan in tuned),
        ):
            names = [run.name for run in runs]
            assert len(names) == len(set(names)) > 0
