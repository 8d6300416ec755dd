"""Train what an experiment needs, and write its tables and plots.

    python -m benchmarks.convergence tune                    # LAMB's learning rate, for every task
    python -m benchmarks.convergence compare                 # all methods, five seeds: hours
    python -m benchmarks.convergence freeze                  # 1-bit LAMB with several freeze steps
    python -m benchmarks.convergence traffic --settings benchmarks/convergence/long.toml
    python -m benchmarks.convergence robustness --settings benchmarks/convergence/short.toml

and, in a minute or two, fail if 1-bit LAMB leaves LAMB's band:

    python -m benchmarks.convergence band --settings benchmarks/convergence/small.toml

Every training leaves one JSON file, and one whose file is there is not repeated: interrupt and go on as you like.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm

from . import experiments, report
from .experiments import Settings
from .tasks import TASKS
from .train import Run, trained

HERE = Path(__file__).parent


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("experiment", choices=["tune", "compare", "freeze", "traffic", "robustness", "band"])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), help="default: all that have settings")
    parser.add_argument("--settings", type=Path, default=HERE / "settings.toml", help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes (default: one per core)")
    parser.add_argument(
        "--results", type=Path, default=HERE.parent / "results" / "convergence", help="default: %(default)s"
    )
    parser.add_argument("--output", type=Path, default=Path("out/convergence"), help="folder of tables and plots")
    return parser.parse_args()


def train_all(runs: list[Run], folder: Path, workers: int) -> None:
    """Train what has no result yet, each once."""
    missing = {run.name: run for run in runs if not (folder / f"{run.name}.json").exists()}
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool, tqdm(total=len(missing)) as bar:
        waiting = {pool.submit(trained, run, folder): name for name, run in missing.items()}
        for done in as_completed(waiting):
            bar.set_postfix_str(f"{waiting[done]}: {report.score(done.result()):.4f}")
            bar.update()


def main() -> None:
    """Tune if need be, train, report."""
    args = parse_args()
    settings = Settings.read(args.settings)
    tasks = args.tasks or list(settings.tasks)

    def score(run: Run) -> float:
        return report.score(trained(run, args.results))

    rates = {}
    if args.experiment in ("compare", "freeze", "traffic", "band"):
        open_rates = [task for task in tasks if len(settings.tasks[task].rates) > 1]
        tuning = [run for task in open_rates for run in experiments.tuning(settings, task)]
        train_all(tuning, args.results, args.workers)
        rates = {task: experiments.best_rate(settings, task, score) for task in tasks}
    choose: dict[str, Callable[[str], list[Run]]] = {
        "tune": lambda task: experiments.tuning(settings, task),
        "compare": lambda task: experiments.comparison(settings, task, rates[task]),
        "freeze": lambda task: experiments.freezing(settings, task, rates[task]),
        "traffic": lambda task: experiments.traffic(settings, task, rates[task]),
        "robustness": lambda task: experiments.robustness(settings, task),
        "band": lambda task: experiments.band(settings, task, rates[task]),
    }
    runs = {task: choose[args.experiment](task) for task in tasks}
    # Seed by seed: what is interrupted has something of every task.
    train_all(
        sorted((run for task in tasks for run in runs[task]), key=lambda run: run.seed), args.results, args.workers
    )
    args.output.mkdir(parents=True, exist_ok=True)
    worse: list[str] = []
    for task, own in runs.items():
        results = [trained(run, args.results) for run in own]
        path = args.output / f"{args.experiment}-{task}.md"
        path.write_text(report.table(results))
        report.plot(results, path.with_suffix(".png"))
        sys.stdout.write(f"## {task}\n\n{path.read_text()}\n")
        worse += [
            f"{task}: {label} is {far:.1f} of LAMB's standard deviations behind LAMB"
            for label, far in report.behind(results).items()
            if not far <= report.BAND
        ]
    if args.experiment == "band" and worse:
        sys.exit(f"Not in LAMB's band of {report.BAND:g}: {'; '.join(worse)}.")


if __name__ == "__main__":
    main()
