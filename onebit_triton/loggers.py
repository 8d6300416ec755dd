"""One line per step: what `OneBitLamb.metrics` says, written to a file or to TensorBoard by rank 0."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from .optimizer import OneBitLamb

START = '{"call": '
"""How every line begins."""


RESERVED = ("call", "time")
"""What a line has besides metrics."""


class _Logger:
    """What loggers share: rank 0 alone, and every so many calls.

    Args:
        every: write at every so many calls; the calls between cost nothing.

    Raises:
        ValueError: unless `every` is an integer of at least 1.
    """

    def __init__(self, every: Any) -> None:
        if not isinstance(every, int) or every < 1:
            raise ValueError(f"Invalid every={every!r}. Must be an integer >= 1 (write at every so many calls).")
        self._every, self._calls = every, 0

    def __call__(self, optimizer: OneBitLamb, **values: Any) -> None:
        """Write what the optimizer's metrics say now; call it on every rank, after each step.

        Args:
            optimizer: whose metrics.
            values: what else to write under its name, such as loss=loss: numbers or tensors of one element.

        Raises:
            TypeError: for a value that is no number.
            ValueError: for a name that metrics have already.
        """
        self._calls += 1
        if optimizer.rank != 0 or self._calls % self._every:
            return
        found = optimizer.metrics()
        numbers = {}
        for name, value in values.items():
            if name in found or name in RESERVED:
                raise ValueError(f"Invalid name {name!r}. Must be none of the names that a line has already.")
            number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if not isinstance(number, (int, float)):
                raise TypeError(f"Invalid {name}={value!r}. Must be a number or a tensor of one element.")
            numbers[name] = number
        self._write(found, numbers)

    def _write(self, found: dict[str, Any], values: dict[str, float]) -> None:
        raise NotImplementedError


class JsonLines(_Logger):
    """Appends one JSON object per line to a file, for `python -m onebit_triton.report`, pandas, or anything.

    A line has the keys of `OneBitLamb.metrics`, what was passed, call (steps taken, skipped ones included) and time
    (seconds since 1970). Numbers have six digits; what is not finite is null. Each line is written whole and the file
    closed, so that a crash leaves it readable. A run that is resumed goes on in the same file.

    Args:
        path: the file; made at the first call if it is not there, its folder must be.
        every: write at every so many calls; the calls between cost nothing.

    Raises:
        ValueError: for a bad `every`, or at the first call if the file is there and was not written by a JsonLines.

    Example:
        >>> log = JsonLines("run.jsonl")
        >>> log(optimizer, loss=loss)  # after each optimizer.step()
    """

    def __init__(self, path: str | os.PathLike[str], every: int = 1) -> None:
        super().__init__(every)
        self._path, self._opened = Path(path), False

    def _write(self, found: dict[str, Any], values: dict[str, float]) -> None:
        if not self._opened:
            self._check_file()
            self._opened = True
        call = found["step"] + found["skipped_steps"]
        line = json.dumps(_plain({"call": call, "time": round(time.time(), 3), **values, **found}), allow_nan=False)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _check_file(self) -> None:
        """Leave a foreign file alone, and drop a last line that a crash cut short."""
        if not self._path.exists() or not self._path.stat().st_size:
            return
        with self._path.open("r+b") as file:
            if not START.encode().startswith(file.read(len(START))):
                raise ValueError(f"Invalid path={str(self._path)!r}. Must be a new file, or one that JsonLines wrote.")
            file.seek(0)
            whole = sum(len(line) for line in file if line.endswith(b"\n"))
            file.truncate(whole)


class TensorBoard(_Logger):
    """Writes scalars under onebit_lamb/, and for every layer one of each list under onebit_lamb_<key>/<layer>.

    Args:
        writer: a torch.utils.tensorboard.SummaryWriter, or anything with its add_scalar; ranks other than 0 may pass
            None.
        every: write at every so many calls; the calls between cost nothing.
        layers: whether to write the lists, which for a model of many tensors are many scalars.

    Raises:
        ValueError: for a bad `every`.

    Example:
        >>> log = TensorBoard(SummaryWriter())
        >>> log(optimizer, loss=loss)  # after each optimizer.step()
    """

    def __init__(self, writer: Any, every: int = 1, layers: bool = True) -> None:
        super().__init__(every)
        self._writer, self._layers = writer, layers

    def _write(self, found: dict[str, Any], values: dict[str, float]) -> None:
        for tag, value in self._scalars({**values, **found}):
            self._writer.add_scalar(tag, value, found["step"])

    def _scalars(self, found: dict[str, Any]) -> Iterator[tuple[str, float]]:
        layers = found.pop("layers")
        for key, value in found.items():
            if isinstance(value, dict):
                yield from ((f"onebit_lamb/{key}/{name}", one) for name, one in value.items())
            elif isinstance(value, (int, float)):
                yield f"onebit_lamb/{key}", value
            elif isinstance(value, list) and self._layers:
                for layer, one in zip(layers, value, strict=True):
                    if isinstance(one, float):
                        yield f"onebit_lamb_{key}/{layer}", one
        yield "onebit_lamb/compressing", float(found["last_stage"] == "compression")


def _plain(value: Any) -> Any:
    """The same with six digits, and None for what JSON cannot say."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        # A time needs all its digits.
        return (float(f"{value:.6g}") if abs(value) < 1e6 else value) if math.isfinite(value) else None
    return value
