"""Train for thousands of steps in real processes while all that can happens, and look whether anything gives way.

    python -m tests.soak                            # 3000 steps on 4 processes, some minutes
    python -m tests.soak --steps 30000 --seed 7     # an hour or two

A small transformer learns real text twice, with the same seeds: undisturbed, and while gradients become NaN on a random
rank or are missing, the learning rate changes, training warms up once more, and is saved and resumed, exactly or on
another number of ranks, with DistributedDataParallel and without, in new processes now and then. It fails if memory,
open files or threads grow, if replicas part, if a state is not what was saved, if a step is lost or one is counted that
was skipped, or if the loss does not end where it does undisturbed. Everything follows from the seed.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from onebit_triton import OneBitLamb

from .ranks import RankPool

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from corpus import Corpus, held_out_batches, load_corpus, training_batch
from model import ByteTransformer, ModelConfig

MODEL = ModelConfig(layers=1, width=64, heads=2, context=64)
SEQUENCES = 12
"""Of all ranks in a step, for any number of ranks that divides it."""

GROWTH = 1.05
"""What memory may grow by between the warm-up of a process and its end."""

SETTLED = 4
"""Parts of the training after which a process has all that it needs."""

BAND = 0.15
"""Nats per byte by which disturbances may change the loss in the end."""


@cache
def corpus() -> Corpus:
    """The text, read once in every process."""
    return load_corpus()


@dataclass(frozen=True)
class Part:
    """Some steps in a row, of one optimizer: from what was saved before to what is saved then.

    Attributes:
        first, last: steps.
        ranks: number of processes.
        ddp: whether DistributedDataParallel averages in warmup.
        portable: whether the state is consolidated in the end: one file for any number of ranks.
        fresh: whether the processes are new.
        bad: step -> rank whose loss is NaN.
        missing: step -> (rank, number of a parameter) of a gradient that is None; in compression, or without DDP.
        rewarm: steps before which to warm up once more, if it is compression.
        slow: steps with another learning rate.
    """

    first: int
    last: int
    ranks: int
    ddp: bool = False
    portable: bool = False
    fresh: bool = False
    bad: tuple[tuple[int, int], ...] = ()
    missing: tuple[tuple[int, int, int], ...] = ()
    rewarm: tuple[int, ...] = ()
    slow: tuple[int, ...] = ()


def undisturbed(steps: int, ranks: int, length: int) -> list[Part]:
    """The plain training, in parts, each of which goes on exactly where the last one ended."""
    return [Part(first, min(first + length, steps), ranks) for first in range(0, steps, length)]


def disturbed(steps: int, ranks: int, length: int, seed: int) -> list[Part]:
    """The same training, disturbed; processes are new twice, so that most live long."""
    rng = random.Random(seed)
    parts: list[Part] = []
    starts = range(0, steps, length)
    fresh = {len(starts) // 4, len(starts) // 2} - {0}
    elsewhere = [n for n in range(1, ranks) if SEQUENCES % n == 0]
    now = ranks
    for number, first in enumerate(starts):
        last = min(first + length, steps)
        following = rng.choice(elsewhere) if elsewhere and now == ranks and rng.random() < 0.2 else ranks
        every = range(first, last)
        bad = tuple((step, rng.randrange(now)) for step in every if rng.random() < 1 / 40)
        missing = tuple((step, rng.randrange(now), rng.randrange(99)) for step in every if rng.random() < 1 / 10)
        rewarm = tuple(step for step in every if rng.random() < 1 / 400)
        slow = tuple(every[: len(every) // 3]) if rng.random() < 0.2 else ()
        portable = following != now or rng.random() < 0.3
        ddp = now > 1 and rng.random() < 0.5
        parts.append(Part(first, last, now, ddp, portable, number in fresh, bad, missing, rewarm, slow))
        now = following
    return parts


def learning_rate(step: int, steps: int) -> float:
    """Rise over the first tenth of the steps, then fall as a cosine to a tenth."""
    ramp = max(1, steps // 10)
    if step < ramp:
        return 0.01 * (step + 1) / ramp
    return 0.01 * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - ramp) / max(1, steps - ramp))))


def digest(state: dict[str, Any]) -> str:
    """Hash of a whole state dict, bits and all."""
    found = hashlib.sha256()

    def take(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            found.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                found.update(str(key).encode())
                take(value[key])
        elif isinstance(value, (list, tuple)):
            for one in value:
                take(one)
        else:
            found.update(repr(value).encode())

    take(state)
    return found.hexdigest()


def held_by_process() -> dict[str, int]:
    """What this process holds: resident kilobytes, open files, threads."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "process": os.getpid(),
        "memory": int(status["VmRSS"].split()[0]),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def train(rank: int, ranks: int, folder: str, part: Part, steps: int, seed: int) -> dict[str, Any]:
    """Train one part on one rank."""
    torch.manual_seed(seed)
    model = ByteTransformer(MODEL)
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    optimizer = OneBitLamb(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.01, freeze_step=max(2, steps // 8),
        betas=(0.9, 0.99), max_grad_norm=1.0, check_replicas_every=25, backend="torch",
    )  # fmt: skip
    own, common = Path(folder, f"rank{rank}"), Path(folder, "common")
    if part.first:
        saved = torch.load(common if common.exists() else own, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        if saved["ranks"] == ranks:
            assert digest(optimizer.state_dict()) == saved["digest"], "what is loaded is not what was saved"
    network: torch.nn.Module = optimizer.attach(DistributedDataParallel(model)) if part.ddp else model
    text, losses = corpus().train, []
    for step in range(part.first, part.last):
        if step in part.rewarm and optimizer.stage == "compression":
            optimizer.rewarm(10)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps) * (0.3 if step in part.slow else 1.0)
        tokens, targets = training_batch(
            text, sequences=SEQUENCES // ranks, context=MODEL.context, seed=seed, step=step, rank=rank,
            world_size=ranks,
        )  # fmt: skip
        loss = network(tokens, targets)
        losses.append(loss.item())
        optimizer.zero_grad()
        (loss * math.nan if (step, rank) in part.bad else loss).backward()
        if not part.ddp or optimizer.stage == "compression":
            for at, whose, number in part.missing:
                if (at, whose) == (step, rank):
                    (matrices + vectors)[number % len(matrices + vectors)].grad = None
        optimizer.step()
    optimizer.check_replicas()
    _save(model, optimizer, rank, ranks, own, common, part.portable)
    metrics = optimizer.metrics()
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    return {
        "losses": (mean / ranks).tolist(), "counted": metrics["step"], "skipped": metrics["skipped_steps"],
        "stage": optimizer.stage, "held_out": _evaluate(model, rank, ranks) if part.last == steps else None,
        **held_by_process(),
    }  # fmt: skip


def _save(
    model: torch.nn.Module, optimizer: OneBitLamb, rank: int, ranks: int, own: Path, common: Path, portable: bool
) -> None:
    if portable:
        optimizer.consolidate_errors()
    state = optimizer.state_dict()
    dist.barrier()
    common.unlink(missing_ok=True)
    dist.barrier()
    if not portable or rank == 0:
        saved = {"model": model.state_dict(), "optimizer": state, "digest": digest(state), "ranks": ranks}
        torch.save(saved, common if portable else own)
    dist.barrier()


@torch.no_grad()
def _evaluate(model: torch.nn.Module, rank: int, ranks: int) -> float:
    """Held-out loss in nats per byte."""
    total = torch.zeros(2)
    for batch in held_out_batches(
        corpus().held_out, sequences=192, context=MODEL.context, batch=16, rank=rank, world_size=ranks
    ):
        total += torch.tensor([model(*batch).item() * len(batch[0]), len(batch[0])])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


class Soak:
    """One training over processes, part by part.

    Args:
        pool: where the ranks run.
        steps, seed: of the training.
        show: called with a part and what rank 0 returned.

    Attributes:
        losses: of all steps.
        samples: what every process held after each part that it took, by its id.
        held_out: loss in the end.
    """

    def __init__(self, pool: RankPool, steps: int, seed: int, show: Any = lambda part, result: None) -> None:
        self.pool, self.steps, self.seed, self.show = pool, steps, seed, show
        self.losses: list[float] = []
        self.samples: dict[int, list[dict[str, int]]] = {}
        self.held_out = math.nan

    def run(self, parts: list[Part]) -> None:
        """Train all parts.

        Raises:
            AssertionError: if steps were lost, or skipped ones counted; RankError for what went wrong on a rank.
        """
        skipped = 0
        with tempfile.TemporaryDirectory() as folder:
            for part in parts:
                if part.fresh:
                    self.pool.close()
                results = self.pool(part.ranks, train, folder, part, self.steps, self.seed)
                skipped += len(part.bad)
                for result in results:
                    keep = {key: result[key] for key in ("memory", "files", "threads")}
                    self.samples.setdefault(result["process"], []).append(keep)
                    assert result["skipped"] == skipped, f"{result['skipped']} steps skipped, not {skipped}"
                    assert result["counted"] + skipped == part.last, f"{result['counted']} steps counted in {part}"
                self.losses += results[0]["losses"]
                self.show(part, results[0])
        self.held_out = results[0]["held_out"]


def grown(samples: dict[int, list[dict[str, int]]]) -> Iterator[str]:
    """What has grown in a process, once it was warm."""
    for process, taken in samples.items():
        warm = taken[SETTLED - 1 : SETTLED + 2]
        late = taken[SETTLED + 2 :][-3:]
        if not late:
            continue
        for key, allowed in (("memory", GROWTH), ("files", 1.0), ("threads", 1.0)):
            # The least of the last few: what comes and goes is no leak.
            before, after = max(sample[key] for sample in warm), min(sample[key] for sample in late)
            if after > before * allowed:
                yield f"{key} of process {process} grew from {before} to {after} in {len(taken)} parts"


def problems(plain: Soak, shaken: Soak) -> Iterator[str]:
    """What is not as it should be in two trainings that have ended."""
    yield from grown(plain.samples)
    yield from grown(shaken.samples)
    for name, run in (("undisturbed", plain), ("disturbed", shaken)):
        tail = max(1, len(run.losses) // 20)
        start, end = run.losses[0], sum(run.losses[-tail:]) / tail
        if not end < start - 1.0:
            yield f"the {name} loss fell from {start:.3f} to {end:.3f} only"
    if not abs(shaken.held_out - plain.held_out) < BAND:
        yield f"disturbed, the held-out loss ends at {shaken.held_out:.3f}, undisturbed at {plain.held_out:.3f}"


def summary(parts: list[Part], soak: Soak) -> str:
    """What happened in a training that has ended, in a sentence."""
    warm = [sample for taken in soak.samples.values() for sample in taken[SETTLED - 1 :]]
    held = {key: sorted({sample[key] for sample in warm}) for key in ("memory", "files", "threads")}
    megabytes = " to ".join(f"{held['memory'][i] / 1024:.0f}" for i in (0, -1)) if warm else "?"
    again = [step for part in parts for step in part.rewarm]
    return (
        f"held-out loss {soak.held_out:.4f}; {sum(len(p.bad) for p in parts)} steps skipped, "
        f"{sum(len(p.missing) for p in parts)} gradients missing, warmed up again before {again}, "
        f"resumed {len(parts) - 1} times, {sum(p.portable for p in parts)} of them consolidated; {len(soak.samples)} "
        f"processes, when warm {megabytes} MB, open files {held['files']}, threads {held['threads']}"
    )


def main() -> None:
    """Soak, and say what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000, help="of each of the two trainings")
    parser.add_argument("--ranks", type=int, default=4, choices=[2, 3, 4, 6], help="processes")
    parser.add_argument("--part", type=int, default=50, help="steps from one save to the next")
    parser.add_argument("--seed", type=int, default=0, help="everything follows from it")
    args = parser.parse_args()
    print(f"seed {args.seed}: {args.steps} steps on {args.ranks} processes, undisturbed and then disturbed", flush=True)
    trainings = {
        "undisturbed": undisturbed(args.steps, args.ranks, args.part),
        "disturbed": disturbed(args.steps, args.ranks, args.part, args.seed),
    }
    finished = []
    for name, parts in trainings.items():
        pool = RankPool()
        with _bar(name, args.steps) as bar:

            def show(part: Part, result: dict[str, Any], bar: Any = bar) -> None:
                bar.update(part.last - part.first)
                memory = f"{result['memory'] / 1024:.0f} MB"
                loss = f"{sum(result['losses']) / len(result['losses']):.3f}"
                bar.set_postfix(loss=loss, stage=result["stage"], ranks=part.ranks, memory=memory)

            soak = Soak(pool, args.steps, args.seed, show)
            try:
                soak.run(parts)
            finally:
                pool.close()
        finished.append(soak)
        print(f"{name}: {summary(parts, soak)}", flush=True)
    found = list(problems(*finished))
    if found:
        sys.exit(f"seed {args.seed}: " + "; ".join(found))
    print("nothing grew, nothing parted, and the losses agree")


def _bar(name: str, steps: int) -> Any:
    """A progress bar; nothing where tqdm is not installed."""
    try:
        from tqdm import tqdm
    except ImportError:

        class Nothing(nullcontext[Any]):
            def __enter__(self) -> Any:
                return self

            update = set_postfix = staticmethod(lambda *args, **kwargs: None)

        return Nothing()
    return tqdm(total=steps, desc=name, mininterval=0.5 if sys.stderr.isatty() else 10.0, dynamic_ncols=True)


if __name__ == "__main__":
    main()
