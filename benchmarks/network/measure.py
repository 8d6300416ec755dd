"""Train under every method at every rate, and collect times, bytes and losses."""

from __future__ import annotations

import math
import os
import platform
import statistics
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.progress import Progress

from onebit_triton.estimate import Estimate, estimate

from . import ranks, topology

TRANSFER_SECONDS = 0.5
"""Length of the transfer that measures what a link carries."""

UNSHAPED_TRANSFER = 200_000_000
"""Bytes of it without a shaper."""

PREDICTED = ("fp32", "fp16", "onebit")
"""The methods that `onebit_triton.estimate` knows."""


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        ranks: processes, each behind a link of its own.
        rates: of the links, as tc writes them; "none" is unshaped.
        methods: keys of `METHODS`.
        steps: of the training whose held-out loss is compared.
        warmup: of them at full precision, for the methods that begin so.
        rounds: at each rate; in each, the methods take turns.
        round_steps: timed steps of a method in a round.
        sequences: held out, to score.
        lr, seed, backend, layers, width, heads: of the training.
    """

    ranks: int
    rates: tuple[str, ...]
    methods: tuple[str, ...]
    steps: int
    warmup: int
    rounds: int
    round_steps: int
    sequences: int
    lr: float
    seed: int
    backend: str
    layers: int
    width: int
    heads: int

    def options(self) -> list[str]:
        """Command line of the ranks."""
        own = ("warmup", "lr", "seed", "backend", "layers", "width", "heads")
        return ["--methods", *self.methods] + [f"--{name}={getattr(self, name)}" for name in own]


def measure(settings: Settings, output: Path) -> dict[str, Any]:
    """Measure everything.

    Args:
        settings: what.
        output: folder for the logs of the ranks.

    Returns:
        settings and versions; parameters; held_out_loss of each method; pays_below, the bandwidth in bit/s below which
        compression is predicted to pay against a rival (None: at any); and for each rate goodput in bit/s, packets
        dropped, seconds of compute, seconds of a step predicted from the unshaped measurement, and for each method
        seconds of a step (median and quartiles) and bytes that a rank sent in a step, the largest of all ranks.
    """
    turns = len(settings.rates) * settings.rounds * (len(settings.methods) + 1)
    with (
        topology.network(settings.ranks) as network,
        ranks.start(network, output, *settings.options()) as processes,
        Progress() as progress,
    ):
        bar = progress.add_task("starting", total=2 * len(settings.methods) + turns)
        parameters = processes.ask("parameters")[0]
        losses = {}
        for method in settings.methods:
            progress.update(bar, description=f"training {method}", advance=1)
            trained = processes.ask("train", method=method, steps=settings.steps)[0]
            if trained["stage"] == "warmup":
                raise RuntimeError(f"{method} is still in warmup after {settings.steps} steps")
            losses[method] = processes.ask("evaluate", method=method, sequences=settings.sequences)[0]
            progress.update(bar, advance=1)
        found: dict[str, Any] = {}
        for rate in settings.rates:
            network.shape(rate)
            progress.update(bar, description=f"timing at {rate}")
            found[rate] = _at_rate(settings, network, processes, rate, lambda: progress.update(bar, advance=1))
    pays_below: dict[str, float] = {}
    for rate, row in found.items():
        if rate != topology.UNSHAPED:
            told = predict(parameters, settings.ranks, row["goodput"], found[topology.UNSHAPED])
            row["predicted"] = {m: getattr(told, m).step for m in settings.methods if m in PREDICTED}
            pays_below = {"fp32": told.pays_below_fp32, "fp16": told.pays_below_fp16}
    limits = {rival: None if math.isinf(bandwidth) else bandwidth for rival, bandwidth in pays_below.items()}
    return {
        "settings": asdict(settings),
        "versions": {name: version(name) for name in ("torch", "pytorch-optimizer", "onebit-triton")}
        | {"python": platform.python_version(), "linux": platform.release()},
        "cores": os.cpu_count(),
        "parameters": parameters,
        "held_out_loss": losses,
        "pays_below": limits,
        "rates": found,
    }


def _at_rate(
    settings: Settings, network: topology.Network, processes: ranks.Ranks, rate: str, advance: Any
) -> dict[str, Any]:
    """Time every method at one rate, in turns."""
    bits = topology.bits_per_second(rate)
    size = UNSHAPED_TRANSFER if rate == topology.UNSHAPED else int(bits / 8 * TRANSFER_SECONDS)
    goodput = network.goodput(size)
    for method in settings.methods:
        processes.ask("train", method=method, steps=1)  # connections adapt to the new rate
    dropped = network.dropped()
    compute: list[float] = []
    seconds: dict[str, list[float]] = {method: [] for method in settings.methods}
    sent = dict.fromkeys(settings.methods, 0)
    for _ in range(settings.rounds):
        compute += processes.ask("compute", method=settings.methods[0], steps=settings.round_steps)[0]["seconds"]
        advance()
        for method in settings.methods:
            before = network.sent()
            seconds[method] += processes.ask("train", method=method, steps=settings.round_steps)[0]["seconds"]
            sent[method] += max(a - b for a, b in zip(network.sent(), before, strict=True))
            advance()
    steps = settings.rounds * settings.round_steps
    return {
        "goodput": goodput,
        "dropped": network.dropped() - dropped,
        "compute": statistics.median(compute),
        "methods": {
            method: {
                "seconds": statistics.median(times),
                "quartiles": statistics.quantiles(times, method="inclusive")[::2],
                "bytes": sent[method] / steps,
            }
            for method, times in seconds.items()
        },
    }


def predict(parameters: int, count: int, bandwidth: float, unshaped: dict[str, Any]) -> Estimate:
    """What `onebit_triton.estimate` says, told nothing of the slow network but the bandwidth that it carries.

    Args:
        parameters: of the model.
        count: of ranks.
        bandwidth: of a link, bit/s.
        unshaped: measurement without shapers. What a step takes there beyond compute, copying to and from the network
            included, is given as the time of the optimizer.
    """
    compute, methods = unshaped["compute"], unshaped["methods"]
    return estimate(
        parameters=parameters,
        ranks=count,
        bandwidth=bandwidth,
        compute=compute,
        optimizer=max(0.0, methods["fp32"]["seconds"] - compute),
        compressed_optimizer=max(0.0, methods["onebit"]["seconds"] - compute),
    )
