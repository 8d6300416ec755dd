"""1-bit LAMB as its formulas say, in fp64: n ranks in one process, plain arrays, no blocks, no bits, no padding.

All tensors stand one after the other in one vector, in memory order and without what is empty. Names are those of the
formulas, which the docstring of OneBitLamb and kernels/README.md have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from onebit_triton.buckets import plan_layout
from onebit_triton.kernels.tables import RHO_DECAY

Array = np.ndarray
Settle = Callable[..., Array]

FP32_SQUARES = float(np.sqrt(np.finfo(np.float32).max))
"""From here on the square of a gradient is not finite in fp32."""

HYPERPARAMETERS = (
    "lr", "eps", "weight_decay", "max_coeff", "min_coeff", "coeff_beta", "factor_max", "factor_min", "factor_threshold",
    "max_rate_ratio",
)  # fmt: skip


def computed(name: str, value: Array, size: Any, where: Any = True, other: Any = None) -> Array:
    """Settle on what the formulas say."""
    return value


def places(parameters: Sequence[torch.Tensor], block: int, bucket: int, ranks: int) -> tuple[Array, Array]:
    """Bucket and chunk of every element: what scales are taken over. Chunks of all buckets are numbered through.

    Args:
        parameters: all parameters, in order.
        block: block_elements.
        bucket: bucket_elements.
        ranks: number of ranks.
    """
    layout = plan_layout(parameters, block, bucket, ranks)
    found: dict[int, tuple[Array, Array]] = {}
    for number, one in enumerate(layout.buckets):
        chunk_elements = one.blocks * block // ranks
        start = 0
        for index, size, blocks in zip(one.parameters, one.sizes, one.segment_blocks, strict=True):
            chunk = number * ranks + np.arange(start, start + size) // chunk_elements
            found[index] = np.full(size, number), chunk
            start += blocks * block
    empty = np.zeros(0, np.int64)
    rows = [found[index] for index in sorted(found)] or [(empty, empty)]
    return np.concatenate([row[0] for row in rows]), np.concatenate([row[1] for row in rows])


class Model:
    """What OneBitLamb must do.

    Args:
        sizes: elements of every tensor, none of them 0.
        groups: the param group of every tensor, a dict of its hyperparameters.
        place: what `places` says of these tensors.
        ranks: number of ranks.
        p: all parameters, one after the other.
        mask: where elements take part, or True.
        freeze_step, bias_correction, coeff_bias_correction, maximize, max_grad_norm, scale: as for the
            optimizer.
        settle: called with the name of a state, what the formulas say of it, the size of what was added up to get
            there, where the state can be seen, and what else it may be where a sign is in doubt. Returns what to go on
            with: where signs of numbers near 0 count, fp32 and fp64 part ways sooner or later.

    Attributes:
        p, m, v, v_fresh: as in the formulas, fp64 [elements].
        e: errors of the workers, [ranks, elements]; E: of the servers, [elements], each in its own chunk.
        taken, C, C_correction, corrections, s, f: per tensor; taken are its steps, corrections those of m and v,
            [2, tensors].
        rho: running sum of the ratio of norms, and its weight.
        stage, calls, counted, skipped, streak, base, steps: where it stands.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        groups: Sequence[dict[str, Any]],
        place: tuple[Array, Array],
        ranks: int,
        p: Array,
        mask: Array | bool = True,
        *,
        freeze_step: int,
        bias_correction: bool = False,
        coeff_bias_correction: bool = True,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        scale: str = "rms",
        settle: Settle = computed,
    ) -> None:
        self.ranks, self.settle, self.l1 = ranks, settle, scale == "l1"
        self.correcting, self.coeff_correcting = bias_correction, coeff_bias_correction
        self.sign = -1.0 if maximize else 1.0
        self.max_norm = np.inf if max_grad_norm is None else max_grad_norm
        self.p = p.astype(np.float64)
        self.m = self.v = self.v_fresh = np.zeros_like(self.p)
        self.taken = self.C = self.C_correction = np.zeros(0)
        self.corrections = np.zeros((2, 0))
        self.s = self.f = np.zeros(0)
        self.rho = np.zeros(2)
        self.stage, self.base, self.steps = "warmup", 0, freeze_step
        self.calls = self.counted = self.skipped = self.streak = 0
        self.sizes: list[int] = []
        self._grow(sizes)
        self.lay_out(place, ranks)
        self.set_groups(groups)
        self.user_mask = np.broadcast_to(mask, self.p.shape)
        self.clear_errors()

    # What is where

    def _grow(self, sizes: Sequence[int]) -> None:
        """Make room for more tensors."""
        more = len(sizes)
        self.sizes += sizes
        self.tensor = np.repeat(np.arange(len(self.sizes)), self.sizes)
        zeros = (np.append(column, np.zeros(more)) for column in (self.taken, self.C, self.C_correction))
        self.taken, self.C, self.C_correction = zeros
        self.corrections = np.append(self.corrections, np.zeros((2, more)), axis=1)
        self.s, self.f = (np.append(c, np.ones(more)) for c in (self.s, self.f))

    def lay_out(self, place: tuple[Array, Array], ranks: int) -> None:
        """Spread the elements over buckets and chunks."""
        self.ranks = ranks
        self.bucket, self.chunk = place

    def set_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Take the hyperparameters of every tensor's group."""
        self.h = {key: np.array([float(group[key]) for group in groups]) for key in HYPERPARAMETERS}
        self.h["beta1"], self.h["beta2"] = np.array([group["betas"] for group in groups], float).reshape(-1, 2).T

    def add_tensors(
        self, sizes: Sequence[int], groups: Sequence[dict[str, Any]], place: tuple[Array, Array], p: Array, mask: Any
    ) -> None:
        """Take in more tensors behind the others, in warmup; groups and place are those of all tensors."""
        new = np.zeros(sum(sizes))
        self._grow(sizes)
        self.p = np.append(self.p, p.astype(np.float64))
        self.m, self.v, self.v_fresh = (np.append(state, new) for state in (self.m, self.v, self.v_fresh))
        self.user_mask = np.append(self.user_mask, np.broadcast_to(mask, new.shape))
        self.lay_out(place, self.ranks)
        self.set_groups(groups)
        self.clear_errors()

    def clear_errors(self) -> None:
        self.e, self.E = np.zeros((self.ranks, self.p.size)), np.zeros(self.p.size)

    def of(self, column: Array) -> Array:
        """A number per tensor, for every element."""
        return column[self.tensor]

    def each(self, key: str) -> Array:
        """A hyperparameter, for every element."""
        return self.of(self.h[key])

    def norm(self, x: Array) -> Array:
        """L2 norm per tensor."""
        return np.sqrt(np.bincount(self.tensor, x * x, len(self.sizes)))

    @property
    def part(self) -> Array:
        """Where elements take part in compression: they saw a gradient, and the user does not leave them out."""
        return self.user_mask & (self.v > 0)

    @property
    def counts(self) -> Array:
        """Elements of every tensor that take part."""
        return np.bincount(self.tensor, self.part, len(self.sizes))

    # One step

    def step(self, gradients: Array) -> None:
        """Take a step with every rank's gradients, [ranks, elements]; missing ones are 0."""
        self.calls += 1
        finite = np.abs(gradients) < FP32_SQUARES
        if not finite.all():
            self.skipped += 1
            self.streak += 1
            if self.stage == "compression" and self.ranks > 1:
                self._undo(self.sign * np.where(finite, gradients, 0.0))
            return
        self.counted += 1
        self.taken = self.taken + 1
        self.streak = 0
        gradients = self.sign * gradients
        if self.stage == "compression":
            self._compressed_step(gradients)
        else:
            ends = self.counted >= self.base + self.steps
            self._warmup_step(gradients, ends)
            if ends:
                self._switch()

    def _warmup_step(self, local: Array, ends: bool) -> None:
        h = self.h
        g, size = local.mean(0), np.abs(local).mean(0)
        norm = np.sqrt((g * g).sum())
        clip = 1.0
        if np.isfinite(self.max_norm) and norm > 0:
            doubt = np.sqrt((size * size).sum()) / norm  # how much the ranks cancel
            if self.ranks > 1:
                rho = np.sqrt((local**2).sum(1).mean()) / norm
                self.rho = self.settle("rho", self.remember(self.rho, np.array([rho, 1.0])), rho * doubt)
            clip = min(1.0, self.max_norm / norm)
            size = size + np.abs(g) * doubt
        g, size = g * clip, size * clip
        b1, b2 = self.each("beta1"), self.each("beta2")
        m = b1 * self.m + (1 - b1) * g
        v = b2 * self.v + (1 - b2) * g * g
        self.v = self.settle("exp_avg_sq", v, (1 - b2) * size * size)
        # Where the warmup ends, momentum that takes no part is gone before anybody sees it.
        size = b1 * np.abs(self.m) + (1 - b1) * size
        self.m = self.settle("exp_avg", m, size, self.part if ends else True)
        beta = np.stack([h["beta1"], h["beta2"]])
        self.corrections = self.settle("bias_correction", beta * self.corrections + 1 - beta, 0)
        _, u, parts = self.directions(np.ones_like(self.part))
        if ends:  # what nobody has seen is as uncertain as what it is added up from
            unseen = np.where(self.part, 0.0, size)
            parts = parts + (unseen / self.of(self.corrections[0]) if self.correcting else unseen) / self.denominator(
                self.v
            )
        p_norm, u_norm = self.norm(self.p), self.norm(u)
        with np.errstate(divide="ignore", invalid="ignore"):
            c = self.trust_ratio(p_norm, u_norm)
            doubt = np.where(u_norm > 0, self.norm(parts) / u_norm, 1.0)  # how much the parts of u cancel
        size = (1 - h["coeff_beta"]) * c * doubt
        self.C = self.settle("lamb_coeff", h["coeff_beta"] * self.C + (1 - h["coeff_beta"]) * c, size)
        correction = h["coeff_beta"] * self.C_correction + 1 - h["coeff_beta"]
        self.C_correction = self.settle("lamb_coeff_correction", correction, 0)
        rate = self.of(h["lr"] * c)
        self.p = self.settle("p", self.p - rate * u, rate * (parts + np.abs(u) * self.of(doubt)))

    @staticmethod
    def remember(rho: Array, new: Array) -> Array:
        """The running sum for rho, and its weight."""
        return RHO_DECAY * rho + (1 - RHO_DECAY) * new

    def trust_ratio(self, p_norm: Array, u_norm: Array) -> Array:
        c = np.clip(p_norm / u_norm, self.h["min_coeff"], self.h["max_coeff"])
        return np.where((p_norm == 0) | (u_norm == 0), 1.0, c)

    def denominator(self, v: Array) -> Array:
        """sqrt(v) + eps."""
        return np.sqrt(v / self.of(self.corrections[1]) if self.correcting else v) + self.each("eps")

    def directions(self, part: Array) -> tuple[Array, Array, Array]:
        """up, u, and the size of what u is added up from."""
        m = self.m / self.of(self.corrections[0]) if self.correcting else self.m
        up = np.where(part, m / self.denominator(self.v), 0.0)
        decay = self.each("weight_decay") * self.p
        return up, up + decay, np.abs(up) + np.abs(decay)

    def _switch(self) -> None:
        """Freeze v and C, and give every tensor its s."""
        part, counts = self.part, self.counts
        self.m = np.where(part, self.m, 0.0)
        self.v_fresh = self.v
        rms = self.norm(self.m) / np.sqrt(np.maximum(counts, 1))
        moving = rms > 0
        s = np.where(moving, rms.sum() / max(moving.sum(), 1) / np.where(moving, rms, 1.0), 1.0)
        self.s = self.settle("scaling_coeff", np.minimum(s, 1e12), 0)
        self.f = np.ones_like(self.f)
        self.clear_errors()
        self.stage = "compression"

    def _compressed_step(self, local: Array) -> None:
        old = self.m
        b1, b2 = self.each("beta1"), self.each("beta2")
        clip = self.clip(local)
        if self.ranks == 1:
            g = local[0] * clip
            m = np.where(self.part, b1 * old + (1 - b1) * g, 0.0)
            self.m = self.settle("exp_avg", m, b1 * np.abs(old) + (1 - b1) * np.abs(g))
            g_size = np.abs(g)
        else:
            self._exchange(local * clip)
            g = (self.m - b1 * old) / (1 - b1)
            g_size = (np.abs(self.m) + b1 * np.abs(old)) / (1 - b1)
        fresh = np.where(self.part, b2 * self.v_fresh + (1 - b2) * g * g, self.v_fresh)
        self.v_fresh = self.settle("exp_avg_sq_fresh", fresh, self.part * (1 - b2) * np.abs(g) * g_size)
        up, u, parts = self.directions(self.part)
        f, doubt = self.factor(up, u, parts)
        self.f = self.settle("last_factor", f, doubt)
        C = self.C / self.C_correction if self.coeff_correcting else self.C
        p_norm, u_norm = self.norm(self.p), self.norm(u)
        with np.errstate(divide="ignore", invalid="ignore"):
            bound = self.h["max_rate_ratio"] * self.trust_ratio(p_norm, u_norm)
            doubt = np.where(u_norm > 0, self.norm(parts) / u_norm, 1.0)
        rate = self.of(self.h["lr"] * np.minimum(C * self.f, bound))
        size = parts + np.abs(u) * self.of(np.where(bound < C * self.f * (1 + 1e-5), doubt, 0.0))
        self.p = self.settle("p", self.p - rate * u, rate * size)

    def clip(self, local: Array) -> float:
        """The factor on all gradients in compression, the same on every rank."""
        rms = np.sqrt((local**2).sum(1).mean())
        rho = self.rho[0] / self.rho[1] if self.rho[1] > 0 and self.ranks > 1 else 1.0
        return min(1.0, self.max_norm * rho / rms) if rms > 0 else 1.0

    def compensated(self, local: Array) -> tuple[Array, Array]:
        """x of every rank, [ranks, elements], and the size of what it is added up from."""
        b1, s, part = self.each("beta1"), self.of(self.s), self.part
        x = (b1 * self.m + (1 - b1) * local) * s + self.e
        size = (b1 * np.abs(self.m) + (1 - b1) * np.abs(local)) * s + np.abs(self.e)
        return np.where(part, x, 0.0), np.where(part, size, 0.0)

    def scale(self, x: Array, where: Array) -> Array:
        """Scale over a bucket or a chunk, of what takes part, for every element."""
        count = np.bincount(where, self.part)
        if self.l1:
            return (np.bincount(where, np.abs(x)) / np.maximum(count, 1))[where]
        return np.sqrt(np.bincount(where, x * x) / np.maximum(count, 1))[where]

    def quantized(self, name: str, x: Array, size: Array, where: Array) -> tuple[Array, Array, Array]:
        """Plus or minus the scale, and the error that is left; signs of what rounds to 0 are those that were seen.

        Also returns the size of what the scale was computed from: it may be far larger where a chunk has few elements.
        """
        part = self.part
        scale, doubt = (np.reshape([self.scale(row, where) for row in np.atleast_2d(of)], x.shape) for of in (x, size))
        q = np.where(x >= 0, scale, -scale)
        error, other = (np.where(part, x - sent, 0.0) for sent in (q, -q))
        error = self.settle(name, error, size + scale + doubt, True, other)
        return np.where(part, np.where(x - error >= 0, scale, -scale), 0.0), error, doubt

    def _exchange(self, local: Array) -> None:
        """Send everybody's momentum as signs, add them up on the servers, and send that as signs."""
        x, size = self.compensated(local)
        q, self.e, doubt = self.quantized("worker_error", x, size, self.bucket)
        y = self.serve(q)
        size = (np.abs(q) + doubt).mean(0) + np.abs(self.E)
        Q, self.E, doubt = self.quantized("server_error", y, np.where(self.part, size, 0.0), self.chunk)
        self.m = self.settle("exp_avg", Q / self.of(self.s), doubt / self.of(self.s))

    def serve(self, q: Array) -> Array:
        return q.mean(0) + self.E

    def factor(self, up: Array, u: Array, parts: Array) -> tuple[Array, Array]:
        """f per tensor, and how large what it was computed from may be."""
        h = self.h
        ratio = np.where(self.part, self.denominator(self.v) / self.denominator(self.v_fresh), 0.0)
        f = np.zeros(len(self.sizes))
        np.maximum.at(f, self.tensor, ratio)
        up_norm, u_norm = self.norm(up), self.norm(u)
        with np.errstate(divide="ignore", invalid="ignore"):
            r = np.where(u_norm > 0, np.minimum(1.0, up_norm / u_norm), 1.0)
            doubt = np.where((u_norm > 0) & (h["weight_decay"] > 0), r * self.norm(parts) / u_norm, 0.0)
        doubt = doubt * np.abs(f - 1)
        f = np.where(h["weight_decay"] > 0, f * r + 1 - r, f)
        f = self.threshold(np.clip(f, h["factor_min"], h["factor_max"]))
        return np.where(self.counts > 0, f, 1.0), doubt

    def threshold(self, f: Array) -> Array:
        """Keep f near the last one."""
        return np.clip(f, self.f * (1 - self.h["factor_threshold"]), self.f * (1 + self.h["factor_threshold"]))

    def _undo(self, finite: Array) -> None:
        """Take a step that is skipped out of the errors again: they are what they were, to rounding."""
        _, size = self.compensated(finite)
        self.e = self.settle("worker_error", self.e, size)

    # Between steps

    def mean_error(self) -> Array:
        """Error that is pending, as parameters will see it."""
        return self.e.mean(0) + self.E

    def consolidate(self) -> None:
        """Give every worker the mean error, and the servers none."""
        if self.stage == "compression" and self.ranks > 1:
            size = np.abs(self.e).mean(0) + np.abs(self.E)
            mean = np.broadcast_to(self.mean_error(), self.e.shape)
            self.e = self.settle("worker_error", mean, size)
            self.E = np.zeros_like(self.E)

    def move(self, place: tuple[Array, Array], ranks: int) -> None:
        """Go on with the mean error on another number of ranks, or in another layout."""
        mean, size = self.mean_error(), np.abs(self.e).mean(0) + np.abs(self.E)
        self.lay_out(place, ranks)
        if ranks == 1:
            self._fold(mean, size)
        self.clear_errors()
        if self.stage == "compression" and ranks > 1:
            self.e = self.settle("worker_error", self.e + mean, size)

    def rewarm(self, steps: int) -> None:
        """Go back to the warmup."""
        self._fold(self.mean_error(), np.abs(self.e).mean(0) + np.abs(self.E))
        self.clear_errors()
        self.s = np.ones_like(self.s)
        self.stage, self.base, self.steps = "warmup", self.counted, steps

    def _fold(self, error: Array, size: Array) -> None:
        """Put an error, added up from things of some size, into the momentum: s b1 m will be e more."""
        weight = self.of(self.s) * self.each("beta1")
        inverse = np.divide(1.0, weight, out=np.zeros_like(weight), where=weight > 0)
        self.m = self.settle("exp_avg", self.m + error * inverse, size * inverse)
