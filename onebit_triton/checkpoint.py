"""State of the optimizer as torch's state dict: one entry per parameter, and the progress of the whole.

In warmup, and if one rank saved it, the state is all there is and loads at any number of ranks. In compression on
several ranks each rank also has pending errors of its own: its state is for the same rank of as many ranks, unless they
were consolidated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from .buckets import Bucket, fingerprint
from .hashing import hash_values
from .kernels.tables import Clip, Decision, Rate
from .stages import Compression, Replica, Uncompressed, Warmup, pending_error
from .stages.switch import dense_momentum, fold_error, set_error

VERSION = 3
KEY = "onebit_lamb"
"""Where a saved param group keeps the progress."""

SCALARS = {
    "step": Rate.STEP,
    "lamb_coeff": Rate.COEFF,
    "lamb_coeff_correction": Rate.COEFF_CORRECTION,
    "bias_correction1": Rate.CORRECTION1,
    "bias_correction2": Rate.CORRECTION2,
    "scaling_coeff": Rate.SCALING,
    "last_factor": Rate.FACTOR,
}
"""Key in a parameter's state -> column of the layer table."""

REPLICATED = frozenset((*SCALARS, "exp_avg", "exp_avg_sq", "exp_avg_sq_fresh", "master"))
"""Keys in a parameter's state that are the same on every rank."""

HASHED = REPLICATED | {"worker_error", "server_error", "pending_error"}
"""Keys of all tensors that this optimizer saves."""

CORRECTIONS = ("lamb_coeff_correction", "bias_correction1", "bias_correction2")
"""Keys of 1 - beta^k: 0 before the first step, and never in compression."""

POSITIVE = ("scaling_coeff", "last_factor")
NOT_NEGATIVE = ("step", "exp_avg_sq", "lamb_coeff", *CORRECTIONS)
"""Keys in a parameter's state whose values have a sign."""

COUNT_LIMIT = 1 << 31
"""Counts are int32 on the device."""


@dataclass
class Progress:
    """Where training stands, as plain numbers.

    Attributes:
        version: of this format.
        stage: "warmup" or "compression".
        calls: calls of step() so far, skipped ones included.
        warmup_base: counted steps when the present (or last) warmup began; warmup_steps: how long it is.
        check_at: call at which the end of warmup is next looked at.
        errors: pending errors: "none"; "own" of a rank, for the same rank, layout and number of ranks; or their "mean".
        ranks, layout: of the process that saved; rank: whose errors they are.
        counted, skipped, streak: decisions so far.
        rho, rho_weight: running ratio of norms for clipping.
        looks: what was seen of a warmup that ends by itself, as lists of the entries of `settling.Look`; None if its
            length is fixed.
        tensors: hash of all tensors of the state; 0: unknown, so that they are not checked.
    """

    version: int
    stage: str
    calls: int
    warmup_base: int
    warmup_steps: int
    check_at: int
    errors: str
    ranks: int
    rank: int
    layout: int
    counted: int = 0
    skipped: int = 0
    streak: int = 0
    rho: float = 0.0
    rho_weight: float = 0.0
    tensors: int = 0
    looks: list[list[float]] | None = None

    def check(self) -> None:
        """Check that every entry has its type and is in its range, and that they fit together.

        Raises:
            ValueError: naming the entry, its value and the rule.
        """
        counts = ("calls", "warmup_base", "warmup_steps", "check_at", "counted", "skipped", "streak")
        for key in ("version", "ranks", "rank", "layout", "tensors", *counts):
            value = getattr(self, key)
            _check(key, value, "an integer", isinstance(value, int) and not isinstance(value, bool))
        for key in counts:
            value = getattr(self, key)
            _check(key, value, f"from 0 to {COUNT_LIMIT - 1}", 0 <= value < COUNT_LIMIT)
        for key in ("rho", "rho_weight"):
            value = getattr(self, key)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            _check(key, value, "a finite number >= 0.0", number and 0.0 <= value < math.inf)
        for key, allowed in (("stage", ("warmup", "compression")), ("errors", ("none", "own", "mean"))):
            value = getattr(self, key)
            _check(key, value, f"one of {', '.join(allowed)}", value in allowed)
        _check("warmup_steps", self.warmup_steps, "at least 1", self.warmup_steps >= 1)
        _check("counted", self.counted, f"at most calls={self.calls}", self.counted <= self.calls)
        _check("skipped", self.skipped, f"at most calls={self.calls}", self.skipped <= self.calls)
        _check("streak", self.streak, f"at most skipped={self.skipped}", self.streak <= self.skipped)
        _check("ranks", self.ranks, "at least 1", self.ranks >= 1)
        _check("rank", self.rank, f"from 0 to ranks={self.ranks} less 1", 0 <= self.rank < self.ranks)
        self._check_looks()
        missing = self.warmup_base + self.warmup_steps - self.counted
        base = self.warmup_base
        _check("warmup_base", base, f"at most counted={self.counted}", base <= self.counted)
        if self.stage == "warmup":
            rule = f"at most {self.calls + missing}, the call with which the warmup ends"
            _check("check_at", self.check_at, rule, self.check_at <= max(self.calls, self.calls + missing))
            _check("errors", self.errors, "none or mean in warmup", self.errors != "own")
        else:
            rule = "at least warmup_base + warmup_steps in compression"
            _check("counted", self.counted, rule, missing <= 0)
            _check("looks", self.looks, "None in compression", self.looks is None)
            rule = "own or mean in compression on several ranks"
            _check("errors", self.errors, rule, self.errors != "none" or self.ranks == 1)

    def _check_looks(self) -> None:
        looks: Any = self.looks
        if looks is None:
            return
        rule = "None, or lists of a step and at least two finite numbers, in the order of the steps"
        lists = isinstance(looks, list) and all(isinstance(look, list) and len(look) >= 3 for look in looks)
        _check("looks", looks, rule, lists)
        plain = all(type(value) in (int, float) and math.isfinite(value) for look in looks for value in look)
        steps = [look[0] for look in looks]
        whole = all(type(step) is int and 0 <= step < COUNT_LIMIT for step in steps)
        _check("looks", looks, rule, plain and whole and steps == sorted(set(steps)))

    def read_device(self, replica: Replica) -> None:
        """Fill in the counters that live on the device (synchronises)."""
        decision, clip = replica.decision.tolist(), replica.clip.tolist()
        self.counted, self.skipped = decision[Decision.COUNTED], decision[Decision.SKIPPED]
        self.streak = decision[Decision.STREAK]
        self.rho, self.rho_weight = clip[Clip.RHO], clip[Clip.RHO_WEIGHT]

    def write_device(self, replica: Replica) -> None:
        """Put the counters back on the device."""
        for entry, value in (
            (Decision.COUNTED, self.counted),
            (Decision.SKIPPED, self.skipped),
            (Decision.STREAK, self.streak),
        ):
            replica.decision[entry] = value
        replica.clip[Clip.RHO], replica.clip[Clip.RHO_WEIGHT] = self.rho, self.rho_weight

    def to_dict(self) -> dict[str, Any]:
        """Plain dict."""
        return asdict(self)


def _check(key: str, value: object, rule: str, holds: bool) -> None:
    if not holds:
        raise ValueError(f"Invalid state_dict: {key} must be {rule}, got {value!r}.")


def refusal(error: Exception) -> ValueError:
    """What to raise for an error that reading a saved state raised."""
    if isinstance(error, ValueError) and str(error).startswith("Invalid"):
        return error
    return ValueError(f"Invalid state_dict: must have torch's form, but reading it raised {error!r}.")


def export_state(
    replica: Replica, stage: Warmup | Uncompressed | Compression, consolidated: bool
) -> dict[Tensor, dict[str, Tensor]]:
    """Copies of every parameter's state, in the parameter's shape and fp32.

    Keys: `SCALARS`, exp_avg, exp_avg_sq; master of a parameter that is not fp32; in compression exp_avg_sq_fresh; on
    several ranks also worker_error (this rank's) and server_error (1-D, the part of the tensor that lies in this rank's
    chunk, often empty). When the errors were consolidated, in any stage exp_avg_sq_fresh and pending_error, the mean of
    all ranks: checkpoints that are read into tensors of the same keys need these to be there before compression.
    """
    exported: dict[Tensor, dict[str, Tensor]] = {}
    for number, bucket in enumerate(replica.buckets):
        flats = {
            "exp_avg": dense_momentum(bucket, stage, number),
            "exp_avg_sq": bucket.exp_avg_sq.abs(),
            "master": bucket.master,
            "exp_avg_sq_fresh": bucket.exp_avg_sq_fresh,
        }
        error = None if bucket.x is None else pending_error(bucket.x, bucket.x_scale)
        if consolidated:
            fresh = bucket.exp_avg_sq.abs() if bucket.exp_avg_sq_fresh is None else bucket.exp_avg_sq_fresh
            flats |= {"exp_avg_sq_fresh": fresh, "pending_error": bucket.zeros() if error is None else error}
        else:
            flats["worker_error"] = error
        views = {key: bucket.views(value) for key, value in flats.items() if value is not None}
        server = None if bucket.y is None or consolidated else pending_error(bucket.y, bucket.y_scale)
        for row, parameter in enumerate(bucket.parameters):
            entry = {key: bucket.rates[row, column].clone() for key, column in SCALARS.items()}
            # A view of a flat buffer would be saved with the whole buffer.
            entry.update({key: value[row].clone() for key, value in views.items()})
            if server is not None:
                entry["server_error"] = server[_in_chunk(bucket, row, replica)].clone()
            exported[parameter] = entry
    return exported


def _in_chunk(bucket: Bucket, row: int, replica: Replica) -> slice:
    """Part of a parameter that lies in this rank's chunk, as a slice of the chunk."""
    chunk = bucket.elements // replica.communicator.ranks
    first = chunk * replica.communicator.rank
    start, size = bucket.map.starts[row], bucket.map.sizes[row]
    low = min(max(start - first, 0), chunk)
    return slice(low, max(low, min(start + size - first, chunk)))


def read_state(
    state_dict: dict[str, Any], param_groups: list[dict[str, Any]], names: dict[Tensor, str], replica: Replica
) -> tuple[Progress, dict[Tensor, dict[str, Any]]]:
    """Progress and every parameter's entry of a saved state, checked whole before anything of it is used.

    Args:
        state_dict: what was saved.
        param_groups: the optimizer's; parameters are matched by name, or by their order if either has no names.
        names: what errors call the parameters.
        replica: where the state is to go.

    Raises:
        ValueError: saying what does not fit; or whatever reading raises if it has not even torch's form, see `refusal`.
    """
    if not isinstance(state_dict, dict):
        raise ValueError(f"Invalid state_dict: must be a dict, got {type(state_dict).__name__}.")
    groups = state_dict["param_groups"]
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in param_groups]:
        raise ValueError("Invalid state_dict: must have as many groups and parameters as the optimizer.")
    progress = _read_progress(groups)
    saved_ids = _in_our_order(groups, param_groups, progress)
    if len(set(saved_ids)) < len(saved_ids):
        raise ValueError("Invalid state_dict: every parameter must have an entry of its own.")
    saved = state_dict["state"]
    entries = {p: saved[number] for p, number in zip(names, saved_ids, strict=True) if number in saved}
    _check_state(progress, entries, names, replica)
    if progress.tensors and progress.tensors != hash_entries(entries.values()):
        raise ValueError(
            "Invalid state_dict: its tensors are not those that were saved: the file is damaged, or somebody has "
            f"changed them. Load an older checkpoint; or, if it was on purpose, set 'tensors' to 0 in {KEY!r} of every "
            "group."
        )
    return progress, entries


def hash_entries(entries: Iterable[dict[str, Tensor]]) -> int:
    """Hash of the tensors that a state has for its parameters, whatever their order (waits for the device)."""
    listed = [{key: entry[key] for key in sorted(entry) if key in HASHED} for entry in entries]
    hashes = iter(hash_values(tensor for entry in listed for tensor in entry.values()))
    return sum(fingerprint([(key, next(hashes)) for key in entry]) for entry in listed) % (1 << 63) or 1


def _in_our_order(
    groups: list[dict[str, Any]], param_groups: list[dict[str, Any]], progress: Progress
) -> list[int | str]:
    """Keys of the saved entries, in the order of the optimizer's parameters."""
    ids = [number for group in groups for number in group["params"]]
    for index, group in enumerate(groups):
        names = group.get("param_names", [""] * len(group["params"]))
        if len(names) != len(group["params"]) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"Invalid state_dict: param_names of group {index} must be a name for each parameter.")
    if not all("param_names" in group for group in (*groups, *param_groups)):
        return ids
    theirs, ours = ([name for group in some for name in group["param_names"]] for some in (groups, param_groups))
    if theirs == ours:
        return ids
    for group, saved in zip(param_groups, groups, strict=True):
        unknown = sorted(set(group["param_names"]) ^ set(saved["param_names"]))
        if unknown:
            raise ValueError(
                f"Invalid state_dict: groups must have the same parameters, but only one of two has {unknown[0]!r}."
            )
    if progress.errors == "own":
        raise ValueError(
            "Invalid state_dict: saved in compression with parameters in another order. Keep the order, or call "
            "consolidate_errors() before saving."
        )
    place = dict(zip(theirs, ids, strict=True))
    return [place[name] for name in ours]


def _read_progress(groups: list[dict[str, Any]]) -> Progress:
    """Progress that a saved state carries.

    Raises:
        ValueError: if it is not a state of this optimizer, or of another version.
    """
    saved = groups[0].get(KEY) if groups else None
    if not isinstance(saved, dict) or "version" not in saved:
        raise ValueError(f"Invalid state_dict: param groups must carry {KEY!r}; is it a state of OneBitLamb?")
    names = {field.name for field in fields(Progress)}
    version = saved["version"]
    if type(version) is not int or not 1 <= version <= VERSION:
        raise ValueError(f"Invalid state_dict: version {version!r}; this release reads 1 to {VERSION}.")
    if version < 3:  # every warmup had a fixed length
        names.remove("looks")
    if version < 2:  # without the hash
        names.remove("tensors")
    if set(saved) != names:
        raise ValueError(f"Invalid state_dict: {KEY!r} must have exactly the entries {sorted(names)}.")
    progress = Progress(**saved)
    progress.check()
    if any(group.get(KEY) != saved for group in groups):
        raise ValueError(f"Invalid state_dict: all param groups must carry the same {KEY!r}.")
    return progress


def _check_state(
    progress: Progress, entries: dict[Tensor, dict[str, Any]], names: dict[Tensor, str], replica: Replica
) -> None:
    """Check that a saved state can be put into a replica, before anything of it is.

    Raises:
        ValueError: saying what does not fit.
    """
    communicator = replica.communicator
    if progress.errors == "own":
        if progress.ranks != communicator.ranks:
            raise ValueError(
                f"Invalid state_dict: saved in compression by {progress.ranks} ranks, loaded by {communicator.ranks}. "
                "Pending errors belong to ranks, and dropping them would lose part of the optimisation: load with as "
                "many ranks, or call consolidate_errors() before saving."
            )
        if progress.rank != communicator.rank:
            raise ValueError(
                f"Invalid state_dict: saved in compression by rank {progress.rank}, loaded by rank "
                f"{communicator.rank}. Every rank has pending errors of its own: save and load one file per rank, or "
                "call consolidate_errors() before saving."
            )
        if progress.layout != replica.layout.fingerprint:
            raise ValueError(
                "Invalid state_dict: saved in compression with another layout (tensor sizes or order, "
                "block_elements, bucket_elements). Use the options it was saved with, or call consolidate_errors() "
                "before saving."
            )
    wanted = ["exp_avg", "exp_avg_sq"]
    if progress.stage == "compression":
        errors = {"none": [], "own": ["worker_error"], "mean": ["pending_error"]}
        wanted += ["exp_avg_sq_fresh", *errors[progress.errors]]
    for bucket in replica.buckets:
        for row, parameter in enumerate(bucket.parameters):
            entry, name = entries.get(parameter, {}), names[parameter]
            if not isinstance(entry, dict):
                raise ValueError(f"Invalid state_dict: the state of {name} must be a dict, got {entry!r}.")
            shapes = dict.fromkeys(wanted, parameter.shape) | dict.fromkeys(SCALARS, torch.Size())
            if "master" in entry:
                shapes["master"] = parameter.shape
            if progress.errors == "own":
                part = _in_chunk(bucket, row, replica)
                shapes["server_error"] = torch.Size([part.stop - part.start])
            for key, shape in shapes.items():
                if not isinstance(entry.get(key), Tensor):
                    raise ValueError(f"Invalid state_dict: the state of {name} must have a tensor {key!r}.")
                if entry[key].shape != shape:
                    raise ValueError(
                        f"Invalid state_dict: {key!r} of {name} must have shape {tuple(shape)}, got "
                        f"{tuple(entry[key].shape)}."
                    )
                _check_numbers(key, entry[key], name, progress.stage)


def _check_numbers(key: str, value: Tensor, name: str, stage: str) -> None:
    """Check that a tensor of a saved state holds numbers that training can go on with.

    Raises:
        ValueError: naming the tensor, the parameter and the rule.
    """
    if not value.is_floating_point() or value.layout != torch.strided or value.device.type == "meta":
        raise ValueError(
            f"Invalid state_dict: {key!r} of {name} must be dense, of a floating dtype and hold data, got "
            f"{value.dtype}, {value.layout} on {value.device}."
        )
    value = value.to(torch.float32)
    if not value.isfinite().all():
        raise ValueError(f"Invalid state_dict: {key!r} of {name} must be finite in fp32.")
    above = key in POSITIVE or (key in CORRECTIONS and stage == "compression")
    lowest = float(value.min()) if value.numel() else math.inf
    if (key in NOT_NEGATIVE and lowest < 0) or (above and lowest <= 0):
        raise ValueError(f"Invalid state_dict: {key!r} of {name} must be {'> 0' if above else '>= 0'}, got {lowest}.")


def import_dense(replica: Replica, entries: dict[Tensor, dict[str, Tensor]], compression: bool) -> None:
    """Copy moments, masters and layer scalars into a replica that is in warmup.

    A master that was not saved, because the parameter was fp32 then, is the parameter.
    """
    for bucket in replica.buckets:
        flats = {"exp_avg": bucket.exp_avg, "exp_avg_sq": bucket.exp_avg_sq}
        if compression:
            bucket.exp_avg_sq_fresh = flats["exp_avg_sq_fresh"] = bucket.zeros()
        for key, flat_state in flats.items():
            assert flat_state is not None
            for view, parameter in zip(bucket.views(flat_state), bucket.parameters, strict=True):
                view.copy_(entries[parameter][key])
        for row, parameter in enumerate(bucket.parameters):
            for key, column in SCALARS.items():
                bucket.rates[row, column] = entries[parameter][key].to(torch.float32)
            if bucket.master is not None and "master" in entries[parameter]:
                bucket.views(bucket.master)[row].copy_(entries[parameter]["master"])


def import_errors(replica: Replica, entries: dict[Tensor, dict[str, Tensor]]) -> None:
    """Make the pending errors of a state those of a replica in compression.

    Their mean becomes every worker's, whatever the number of ranks; on one rank, where nothing is compressed, it is
    folded into the momentum.
    """
    for bucket in replica.buckets:
        mean = bucket.zeros()
        for row, (view, parameter) in enumerate(zip(bucket.views(mean), bucket.parameters, strict=True)):
            entry = entries[parameter]
            if "pending_error" in entry:
                view.copy_(entry["pending_error"])
            elif bucket.x is not None and bucket.y is not None and "worker_error" in entry:
                view.copy_(entry["worker_error"])
                set_error(bucket.y[_in_chunk(bucket, row, replica)], entry["server_error"])
        if bucket.x is not None:
            set_error(bucket.x, mean)
        else:
            fold_error(bucket, mean)


def carry_over(old: Replica, new: Replica) -> None:
    """Copy the warmup state of the parameters that two replicas share; for a param group added in warmup."""
    for bucket in old.buckets:
        bucket.point_at_parameters()  # masters follow
    places = {parameter: (bucket, row) for bucket in old.buckets for row, parameter in enumerate(bucket.parameters)}
    for parameter, bucket, row in _rows(new):
        if parameter in places:
            source, source_row = places[parameter]
            bucket.rates[row] = source.rates[source_row]
            for mine, theirs in (
                (bucket.exp_avg, source.exp_avg),
                (bucket.exp_avg_sq, source.exp_avg_sq),
                (bucket.master, source.master),
            ):
                if mine is not None and theirs is not None:
                    bucket.views(mine)[row].copy_(source.views(theirs)[source_row])
    new.decision.copy_(old.decision)
    new.clip.copy_(old.clip)


def _rows(replica: Replica) -> Iterator[tuple[Tensor, Bucket, int]]:
    for bucket in replica.buckets:
        for row, parameter in enumerate(bucket.parameters):
            yield parameter, bucket, row
