"""Whole steps of one bucket over several ranks against ALGORITHM.md's formulas, in fp64 and without blocks or bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from onebit_triton.kernels.backends import Passes
from onebit_triton.kernels.planes_reference import header, lazy_error, masked_zero, planes
from onebit_triton.kernels.tables import RHO_DECAY, Clip, Decision, Rate, TensorTable

from .bed import CPU, TORCH, TRITON, Bed, Case, group_of

RANKS = 3
CASES = [
    Case("plain", (70, 3, 40, 5, 9), ranks=RANKS, bias_correction=False),
    Case("bias", (70, 3, 40, 5, 9), ranks=RANKS, coeff_bias_correction=False, weight_decay=0.2),
]


class Model:
    """Plain 1-bit LAMB of tensors in one padded vector, fp64. Names are those of the formulas."""

    def __init__(self, bed: Bed) -> None:
        def double(tensor: Tensor) -> np.ndarray:
            return tensor.double().numpy().copy()

        self.case, self.n, self.segments = bed.case, bed.case.ranks, bed.blocks.segments
        self.tensor = bed.blocks.segment.repeat_interleave(bed.case.block).numpy()
        self.inside = bed.inside().numpy()
        groups = [group_of(bed.case, j) for j in range(self.segments)]
        self.h = {key: np.array([group[key] for group in groups]) for key in groups[0]}
        self.p, self.m, self.v = double(bed.flat("param")), double(bed["exp_avg"]), double(bed["exp_avg_sq"])
        rates = double(bed["rates"])
        self.C, self.C_correction = rates[:, Rate.COEFF], rates[:, Rate.COEFF_CORRECTION]
        self.corrections = rates[:, [Rate.CORRECTION1, Rate.CORRECTION2]].T
        self.max_norm, self.rho = float(bed["clip"][Clip.MAX_NORM]), double(bed["clip"][[Clip.RHO, Clip.RHO_WEIGHT]])

    def of(self, column: np.ndarray) -> np.ndarray:
        """A value per tensor, for every element."""
        return column[self.tensor]

    def norm(self, x: np.ndarray) -> np.ndarray:
        """L2 norm per tensor."""
        return np.sqrt(np.bincount(self.tensor, x * x, self.segments))

    def beta(self, which: int) -> np.ndarray:
        return self.of(self.h["betas"][:, which])

    def directions(self) -> tuple[np.ndarray, np.ndarray]:
        """up and u."""
        one, two = self.corrections if self.case.bias_correction else np.ones((2, self.segments))
        up = self.m / self.of(one) / (np.sqrt(np.abs(self.v) / self.of(two)) + self.of(self.h["eps"]))
        up = np.where(self.part, up, 0.0)
        return up, up + self.of(self.h["weight_decay"]) * self.p

    def warmup_step(self, gradients: np.ndarray) -> None:
        h, g = self.h, gradients.mean(0)
        norm = np.sqrt((g * g).sum())
        self.rho = RHO_DECAY * self.rho + (1 - RHO_DECAY) * np.array(
            [np.sqrt((gradients**2).sum(1).mean()) / norm, 1.0]
        )
        self.clip = min(1.0, self.max_norm / norm)
        g = g * self.clip
        self.m = self.beta(0) * self.m + (1 - self.beta(0)) * g
        self.v = self.beta(1) * self.v + (1 - self.beta(1)) * g * g
        self.corrections = h["betas"].T * self.corrections + 1 - h["betas"].T
        self.part = self.inside
        _, u = self.directions()
        p_norm, u_norm = self.norm(self.p), self.norm(u)
        with np.errstate(divide="ignore", invalid="ignore"):
            c = np.clip(p_norm / u_norm, h["coeff"][:, 0], h["coeff"][:, 1])
        c = np.where((p_norm == 0) | (u_norm == 0), 1.0, c)
        self.C = h["coeff_beta"] * self.C + (1 - h["coeff_beta"]) * c
        self.C_correction = h["coeff_beta"] * self.C_correction + 1 - h["coeff_beta"]
        self.p = self.p - self.of(h["lr"] * c) * u

    def switch(self, mask: np.ndarray) -> None:
        """Freeze v and C; elements outside the mask, or that never saw a gradient, take no part."""
        self.part = mask & (self.v > 0)
        self.v = np.where(mask, self.v, -self.v)
        self.m = np.where(self.part, self.m, 0.0)
        self.fresh = self.v.copy()
        self.counts = np.bincount(self.tensor, self.part, self.segments)
        rms = self.norm(self.m) / np.sqrt(np.maximum(self.counts, 1))
        moving = rms > 0
        self.s = np.where(moving, rms[moving].mean() / np.where(moving, rms, 1.0), 1.0)
        self.f = np.ones(self.segments)
        self.e, self.E = np.zeros((self.n, self.p.size)), np.zeros(self.p.size)

    def compressed_step(self, gradients: np.ndarray) -> None:
        h, n, s = self.h, self.n, self.of(self.s)
        rms = np.sqrt((gradients**2).sum(1).mean())
        self.clip = min(1.0, self.max_norm * self.rho[0] / self.rho[1] / rms)
        x = (self.beta(0) * self.m + (1 - self.beta(0)) * gradients * self.clip) * s + self.e
        x = np.where(self.part, x, 0.0)
        self.S = np.sqrt((x * x).sum(1) / self.part.sum())
        q = np.where(self.part, np.where(x >= 0, 1.0, -1.0) * self.S[:, None], 0.0)
        self.e = x - q
        y = q.mean(0) + self.E
        chunks = y.reshape(n, -1)
        self.T = np.sqrt((chunks**2).sum(1) / np.maximum(self.part.reshape(n, -1).sum(1), 1))
        Q = np.where(self.part, np.where(y >= 0, 1.0, -1.0) * np.repeat(self.T, chunks.shape[1]), 0.0)
        self.E = y - Q
        old, self.m = self.m, Q / s
        g = (self.m - self.beta(0) * old) / (1 - self.beta(0))
        fresh = self.beta(1) * self.fresh + (1 - self.beta(1)) * g * g
        self.fresh = np.where(self.part, fresh, self.fresh)
        eps = self.of(h["eps"])
        two = self.of(self.corrections[1]) if self.case.bias_correction else 1.0
        ratio = (np.sqrt(np.abs(self.v) / two) + eps) / (np.sqrt(np.abs(self.fresh) / two) + eps)
        f = np.array([ratio[self.part & (self.tensor == j)].max(initial=0.0) for j in range(self.segments)])
        up, u = self.directions()
        up_norm, u_norm = self.norm(up), self.norm(u)
        r = np.where(u_norm > 0, np.minimum(1, up_norm / np.where(u_norm > 0, u_norm, 1)), 1.0)
        f = np.where(h["weight_decay"] > 0, f * r + 1 - r, f)
        f = np.clip(f, h["factor"][:, 0], h["factor"][:, 1])
        f = np.clip(f, self.f * (1 - h["threshold"]), self.f * (1 + h["threshold"]))
        self.f = np.where(self.counts > 0, f, 1.0)
        C = self.C / self.C_correction if self.case.coeff_bias_correction else self.C
        self.rate = h["lr"] * C * self.f
        self.p = self.p - self.of(self.rate) * u


class Ranks:
    """The same steps out of the passes of one backend, on one bed per rank."""

    def __init__(self, passes: Passes, bed: Bed) -> None:
        self.passes = passes
        self.beds = [bed.clone() for _ in range(bed.case.ranks)]
        self.head = self.beds[0]
        self.old = [torch.zeros_like(bed["old"]) for bed in self.beds]

    def set_gradients(self, gradients: np.ndarray) -> None:
        for bed, gradient in zip(self.beds, gradients, strict=True):
            for i, start in enumerate(bed.blocks.starts):
                grad = bed[f"grad.{i}"]
                grad.copy_(torch.from_numpy(gradient[start : start + grad.numel()]))

    def local_squares(self) -> Tensor:
        for bed in self.beds:
            self.passes.gradient_norms(bed.grads, bed.blocks, bed["norms"])
        return torch.stack([bed["norms"].sum() for bed in self.beds])

    def warmup_step(self) -> None:
        """On the first rank; the others would do the same."""
        passes, bed = self.passes, self.head
        local = self.local_squares()
        for one in self.beds:
            passes.flatten_gradients(one.grads, one.blocks, one["averaged"], len(self.beds))
        averaged = torch.stack([one["averaged"] for one in self.beds]).sum(0)
        grads = TensorTable(bed.blocks.segments, torch.float32, CPU)
        grads.set(
            [averaged[start : start + size] for start, size in zip(bed.blocks.starts, bed.blocks.sizes, strict=True)]
        )
        passes.gradient_norms(grads, bed.blocks, bed["norms"])
        passes.decide_averaged(bed["norms"], local, bed["roll"], bed["decision"], bed["clip"], True)
        passes.lamb_moments(
            bed.params, grads, bed.blocks, bed["exp_avg"], bed["exp_avg_sq"], bed["hyper"], bed["rates"], bed["clip"],
            bed["decision"], bed["partials2"], bed.case.bias_correction,
        )  # fmt: skip
        passes.trust_ratio(bed.blocks, bed["partials2"], bed["hyper"], bed["rates"], bed["decision"])
        passes.lamb_apply(
            bed.params, bed.copies, bed.blocks, bed["exp_avg"], bed["exp_avg_sq"], bed["hyper"], bed["rates"],
            bed["decision"], bed.case.bias_correction,
        )  # fmt: skip

    def switch(self, model: Model) -> None:
        """Give every rank the state of the first, with the model's masks and factors."""
        part = torch.from_numpy(model.part)
        for rank, bed in enumerate(self.beds):
            for name in ("exp_avg", "exp_avg_sq", "clip", "decision", "rates"):
                bed[name].copy_(self.head[name])
            bed["exp_avg_sq"].copy_(torch.from_numpy(model.v).sign() * bed["exp_avg_sq"].abs())
            bed["exp_avg"].mul_(part)
            bed["exp_avg_sq_fresh"].copy_(bed["exp_avg_sq"])
            bed["rates"][:, Rate.SCALING] = torch.from_numpy(model.s).float()
            bed["rates"][:, Rate.COUNT] = torch.from_numpy(model.counts).float()
            bed["rates"][:, Rate.FACTOR] = 1.0
            bed["x"].copy_(torch.where(part, 0.0, -0.0))
            bed["y"].copy_(bed["x"].view(len(self.beds), -1)[rank])
            bed["count"].fill_(int(part.sum()))
            bed["chunk_count"].fill_(int(part.view(len(self.beds), -1)[rank].sum()))
            bed["x_scale"].zero_()
            bed["y_scale"].zero_()

    def compressed_step(self, dense: bool) -> None:
        passes, beds, head = self.passes, self.beds, self.head
        local = self.local_squares()
        words = torch.tensor([head["message"].numel() // 4], dtype=torch.int32)
        for rank, bed in enumerate(beds):
            passes.clip_local(local, bed["clip"])
            passes.compress_momentum(
                bed.grads, bed.blocks, bed["x"], bed["x_scale"], bed["old"], bed["exp_avg"] if dense else None,
                bed["hyper"], bed["rates"], bed["clip"], bed["new"], bed["partials2"],
            )  # fmt: skip
            bed["stamp"][0] = rank
            passes.seal_worker(
                bed["partials2"], bed["count"], bed["tag"], bed["stamp"], bed["decision"], bed["new"], bed["x_scale"]
            )
        for rank, bed in enumerate(beds):
            for source, sender in enumerate(beds):
                bed["received"][source] = sender["new"][rank]
            starts = torch.arange(len(beds)).view(1, -1) * bed["message"].numel()
            passes.decide_exchanged(bed["received"].view(-1), starts, words, bed["decision"])
            passes.reduce_chunk(
                bed["received"], bed["y"], bed["y_scale"], bed["decision"], bed["message"], bed["chunk_partials"],
                bed.case.block,
            )  # fmt: skip
            passes.seal_server(
                bed["chunk_partials"], bed["chunk_count"], bed["tag"], bed["stamp"], bed["decision"], bed["message"],
                bed["y_scale"],
            )  # fmt: skip
        head["new"].copy_(torch.stack([bed["message"] for bed in beds]))
        for bed in beds:
            passes.accept_returned(head["new"], bed["tag"], bed["decision"], True)
            assert not bed["decision"][[Decision.SKIP, Decision.FAULT, Decision.DAMAGED]].any()
        passes.fresh_variance(
            head.params, None, head.blocks, head["old"], head["new"], head["exp_avg"] if dense else None,
            head["exp_avg_sq"], head["exp_avg_sq_fresh"], head["hyper"], head["rates"], head["clip"],
            head["decision"], head["partials3"], head.case.bias_correction,
        )  # fmt: skip
        passes.soft_threshold_rate(head.blocks, head["partials3"], head["hyper"], head["rates"], head["decision"])
        passes.compressed_apply(
            head.params, head.copies, head.blocks, head["old"], head["new"], None, head["exp_avg_sq"], head["hyper"],
            head["rates"], head["decision"], head.case.bias_correction,
        )  # fmt: skip
        for bed in beds[1:]:
            bed["old"].copy_(head["old"])


def near(found: Tensor, expected: np.ndarray, largest: float = 0.0) -> None:
    """Equal to a few fp32 roundings of the largest value, here or on the way."""
    atol = 2e-6 * float(np.abs(expected).max(initial=largest))
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=2e-5, atol=atol)


def error_of(state: Tensor, scale: Tensor) -> Tensor:
    """The error that x or y carries."""
    return torch.where(masked_zero(state), 0.0, lazy_error(state, scale))


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("passes", [TORCH, TRITON], ids=lambda passes: passes.name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_follow_the_formulas(case: Case, passes: Passes) -> None:
    bed = Bed(case)
    bed["param.2"].copy_(torch.linspace(-40, 30, 40))  # weight decay rivals the momentum
    random = np.random.default_rng(7)
    model, ranks = Model(bed), Ranks(passes, bed)
    head = ranks.head

    def gradients() -> np.ndarray:
        local = random.standard_normal((RANKS, bed.elements)) * 0.3 * model.inside
        local[:, np.isin(model.tensor, (3, 4))] = 0.0  # no gradients there
        local = local.astype(np.float32).astype(np.float64)
        ranks.set_gradients(local)
        return local

    local = gradients()
    model.warmup_step(local)
    ranks.warmup_step()
    assert model.clip < 1.0
    near(head["clip"], np.array([model.clip, *model.rho, model.max_norm, 1.0]))
    near(head["exp_avg"], model.m)
    near(head["exp_avg_sq"], model.v)
    near(head["rates"][:, Rate.COEFF], model.C)
    near(head["rates"][:, Rate.COEFF_CORRECTION], model.C_correction)
    near(head.flat("param"), model.p)

    mask = model.inside & (random.random(bed.elements) > 0.1)
    model.switch(mask)
    ranks.switch(model)
    assert 0 < model.part.sum() < model.inside.sum()
    for step in range(2):
        local = gradients()
        model.compressed_step(local)
        ranks.compressed_step(dense=step == 0)
        assert model.clip < 1.0
        assert head["decision"][[Decision.SKIP, Decision.COUNTED]].tolist() == [0, 9 + step]
        for rank, one in enumerate(ranks.beds):
            near(one["x_scale"], model.S[rank : rank + 1])
            near(one["y_scale"], model.T[rank : rank + 1])
            near(error_of(one["x"], one["x_scale"]), model.e[rank], model.S[rank])
            near(error_of(one["y"], one["y_scale"]), model.E.reshape(RANKS, -1)[rank], model.T[rank])
        near(header(head["new"], 0), model.T)
        assert planes(head["new"]).any()
        near(head["exp_avg_sq_fresh"], model.fresh)
        near(head["rates"][:, Rate.FACTOR], model.f)
        near(head["rates"][:, Rate.RATE], model.rate)
        near(head.flat("param"), model.p)
