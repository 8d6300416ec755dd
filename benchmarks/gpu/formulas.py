"""What each pass must compute, in fp64 and straight from the formulas in kernels/README.md.

A formula takes the arguments of a pass as they were before it, by name, and gives the expected values of those that it
writes. Where messages are expected, the value is the number whose sign they must carry.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from onebit_triton.kernels.tables import HEADER_BYTES, RHO_DECAY, Clip, Hyper, Rate

ELEMENTWISE = ("out", "params", "copies", "exp_avg", "exp_avg_sq_fresh", "exp_avg_sq", "x", "y")
"""What may also be off by some roundings of the largest element, since terms may cancel."""


def signs(messages: Tensor, block_elements: int) -> Tensor:
    """Signs that messages [n, bytes] (or one message) carry, fp64 [blocks, block_elements] of -1 and 1."""
    planes = messages.view(-1, messages.shape[-1])[:, HEADER_BYTES:].reshape(-1, block_elements // 8)
    bits = torch.stack([(planes >> k) & 1 for k in range(8)], dim=1)
    return bits.view(-1, block_elements).double() * 2 - 1


def scales(messages: Tensor) -> Tensor:
    """Scales at the heads of messages [n, bytes], fp64 [n]."""
    return messages[:, :4].contiguous().view(torch.float32).view(-1).double()


def _column(a: Any, table: str, column: int) -> Tensor:
    return a.blocks.rows(getattr(a, table).double(), column)


def _beta(a: Any, complement: int) -> Tensor:
    """A decay, from its complement in the table, which is rounded less."""
    return 1 - _column(a, "hyper", complement)


def _shaped(a: Any, flat: Tensor) -> Tensor:
    return flat.view(-1, a.blocks.block_elements).double()


def _gradient(a: Any) -> Tensor:
    return a.grads.gather(a.blocks).double() * float(a.clip[Clip.GRAD_SCALE])


def _finite(g: Tensor) -> Tensor:
    return torch.where((g * g).float().isfinite(), g, 0.0)


def _momentum(a: Any, messages: Tensor) -> Tensor:
    """Dense, or plus or minus the scale of its chunk over s_j."""
    if a.exp_avg is not None:
        return _shaped(a, a.exp_avg)
    per_block = scales(messages).repeat_interleave(a.blocks.blocks // messages.shape[0]).unsqueeze(1)
    return signs(messages, a.blocks.block_elements) * per_block / _column(a, "rates", Rate.SCALING)


def _corrections(a: Any, advance: bool) -> tuple[Tensor | float, Tensor | float]:
    if not a.bias_correction:
        return 1.0, 1.0
    one, two = _column(a, "rates", Rate.CORRECTION1), _column(a, "rates", Rate.CORRECTION2)
    if advance:
        beta1, beta2 = _beta(a, Hyper.ONE_MINUS_BETA1), _beta(a, Hyper.ONE_MINUS_BETA2)
        one, two = beta1 * one + 1 - beta1, beta2 * two + 1 - beta2
    return one, two


def _error(x: Tensor, scale: Tensor) -> Tensor:
    return torch.where(_masked(x), 0.0, x - scale.double() * torch.where(x >= 0, 1.0, -1.0))


def _masked(x: Tensor) -> Tensor:
    return (x == 0) & torch.signbit(x)


def _new_momentum(a: Any) -> Tensor:
    """x without its error: (b1 m + (1-b1) g) s_j."""
    beta = _beta(a, Hyper.ONE_MINUS_BETA1)
    moved = beta * _momentum(a, a.old_messages) + (1 - beta) * _finite(_gradient(a))
    return moved * _column(a, "rates", Rate.SCALING)


def flatten_gradients(a: Any) -> dict[str, Tensor]:
    return {"out": (a.grads.gather(a.blocks).double() / a.ranks).view(-1)}


def gradient_norms(a: Any) -> dict[str, Tensor]:
    return {"partials": a.grads.gather(a.blocks).double().square().sum(1)}


def decide_averaged(a: Any) -> dict[str, Tensor]:
    clip, squares = a.clip.double(), a.partials.double().sum()
    norm = squares.sqrt() * clip[Clip.UNSCALE].abs()
    if not squares.float().isfinite():
        clip[Clip.GRAD_SCALE] = clip[Clip.UNSCALE]
        return {"clip": clip}
    clip[Clip.GRAD_SCALE] = (clip[Clip.MAX_NORM] / norm).clamp(max=1.0) * clip[Clip.UNSCALE]
    if a.track_rho:
        rho = a.local_squares.double().mean().sqrt() / norm
        for entry, value in ((Clip.RHO, rho), (Clip.RHO_WEIGHT, 1.0)):
            clip[entry] = RHO_DECAY * clip[entry] + (1 - RHO_DECAY) * value
    return {"clip": clip}


def clip_local(a: Any) -> dict[str, Tensor]:
    clip, norm = a.clip.double(), a.local_squares.double().mean().sqrt()
    rho = clip[Clip.RHO] / clip[Clip.RHO_WEIGHT] if clip[Clip.RHO_WEIGHT] > 0 else 1.0
    scale = clip[Clip.MAX_NORM] * rho / norm
    clip[Clip.GRAD_SCALE] = torch.where(scale < 1, scale, 1.0) * clip[Clip.UNSCALE]
    return {"clip": clip}


def lamb_moments(a: Any) -> dict[str, Tensor]:
    p, g = a.params.gather(a.blocks).double(), _gradient(a)
    beta1, beta2 = _beta(a, Hyper.ONE_MINUS_BETA1), _beta(a, Hyper.ONE_MINUS_BETA2)
    m = beta1 * _shaped(a, a.exp_avg) + (1 - beta1) * g
    v = beta2 * _shaped(a, a.exp_avg_sq) + (1 - beta2) * g * g
    one, two = _corrections(a, advance=True)
    u = m / one / ((v / two).sqrt() + _column(a, "hyper", Hyper.EPS)) + _column(a, "hyper", Hyper.WEIGHT_DECAY) * p
    partials = torch.stack((p.square().sum(1), u.square().sum(1)))
    return {"exp_avg": m.view(-1), "exp_avg_sq": v.view(-1), "partials": partials}


def trust_ratio(a: Any) -> dict[str, Tensor]:
    hyper, rates = a.hyper.double(), a.rates.double()
    p_norm, u_norm = a.blocks.sum(a.partials.double()[0]).sqrt(), a.blocks.sum(a.partials.double()[1]).sqrt()
    still = (p_norm == 0) | (u_norm == 0)
    rates[:, Rate.UNCLIPPED] = torch.where(still, 1.0, p_norm / u_norm)
    c = (p_norm / u_norm).clamp(hyper[:, Hyper.MIN_COEFF], hyper[:, Hyper.MAX_COEFF])
    c = torch.where(still, 1.0, c)
    rates[:, Rate.STEP] += 1
    for column, complement, value in (
        (Rate.COEFF, Hyper.ONE_MINUS_COEFF_BETA, c),
        (Rate.COEFF_CORRECTION, Hyper.ONE_MINUS_COEFF_BETA, 1.0),
        (Rate.CORRECTION1, Hyper.ONE_MINUS_BETA1, 1.0),
        (Rate.CORRECTION2, Hyper.ONE_MINUS_BETA2, 1.0),
    ):
        rates[:, column] += hyper[:, complement] * (value - rates[:, column])
    rates[:, Rate.COEFF_USED], rates[:, Rate.RATE] = c, hyper[:, Hyper.LR] * c
    return {"rates": rates}


def _parameters(a: Any, new: Tensor) -> dict[str, Tensor]:
    """New parameters, and what is written of them besides."""
    return {"params": new} | ({} if a.copies is None else {"copies": new})


def lamb_apply(a: Any) -> dict[str, Tensor]:
    p, (one, two) = a.params.gather(a.blocks).double(), _corrections(a, advance=False)
    denominator = (_shaped(a, a.exp_avg_sq) / two).sqrt() + _column(a, "hyper", Hyper.EPS)
    u = _shaped(a, a.exp_avg) / one / denominator + _column(a, "hyper", Hyper.WEIGHT_DECAY) * p
    return _parameters(a, p - _column(a, "rates", Rate.RATE) * u)


def compress_momentum(a: Any) -> dict[str, Tensor]:
    x, g = _shaped(a, a.x), _gradient(a)
    new = torch.where(_masked(x), 0.0, _new_momentum(a) + _error(x, a.x_scale))
    partials = torch.stack((new.square().sum(1), g.square().sum(1)))
    return {"x": new.view(-1), "new_messages": new, "partials": partials}


def seal_worker(a: Any) -> dict[str, Tensor]:
    return {"x_scale": (a.partials.double()[0].sum() / a.count.double().clamp(min=1)).sqrt()}


def undo_momentum(a: Any) -> dict[str, Tensor]:
    x = _shaped(a, a.x)
    return {"x": torch.where(_masked(x), 0.0, x - _new_momentum(a)).view(-1)}


def reduce_chunk(a: Any) -> dict[str, Tensor]:
    y = a.y.view(-1, a.block_elements).double()
    sent = signs(a.received, a.block_elements).view(a.received.shape[0], *y.shape) * scales(a.received).view(-1, 1, 1)
    new = torch.where(_masked(y), 0.0, sent.mean(0) + _error(y, a.y_scale))
    return {"y": new.view(-1), "message": new, "partials": new.square().sum(1)}


def seal_server(a: Any) -> dict[str, Tensor]:
    return {"y_scale": (a.partials.double().sum() / a.count.double().clamp(min=1)).sqrt()}


def fresh_variance(a: Any) -> dict[str, Tensor]:
    v, v_fresh, p = _shaped(a, a.exp_avg_sq), _shaped(a, a.exp_avg_sq_fresh), a.params.gather(a.blocks).double()
    beta1, beta2 = _beta(a, Hyper.ONE_MINUS_BETA1), _beta(a, Hyper.ONE_MINUS_BETA2)
    eps = _column(a, "hyper", Hyper.EPS)
    part, (one, two) = v > 0, _corrections(a, advance=False)
    old = _momentum(a, a.old_messages)
    if a.grads is None:
        bits = SimpleNamespace(exp_avg=None, blocks=a.blocks, rates=a.rates)
        m = torch.where(part, _momentum(bits, a.new_messages), 0.0)
        g = (m - beta1 * old) / (1 - beta1)
    else:
        g = _finite(_gradient(a))
        m = torch.where(part, beta1 * old + (1 - beta1) * g, 0.0)
    fresh = torch.where(part, beta2 * v_fresh + (1 - beta2) * g * g, v_fresh)
    denominator = (v.abs() / two).sqrt() + eps
    ratio = torch.where(part, denominator / ((fresh.abs() / two).sqrt() + eps), 0.0)
    direction = torch.where(part, m / one / denominator, 0.0)
    u = direction + _column(a, "hyper", Hyper.WEIGHT_DECAY) * p
    squares = [each.square().sum(1) for each in (direction, u, p)]
    partials = torch.stack((ratio.amax(1), *squares))
    found = {"exp_avg_sq_fresh": fresh.view(-1), "partials": partials}
    return found if a.grads is None else {**found, "exp_avg": m.view(-1)}


def soft_threshold_rate(a: Any) -> dict[str, Tensor]:
    hyper, rates, partials = a.hyper.double(), a.rates.double(), a.partials.double()
    f, (up, u, p) = a.blocks.max(partials[0]), (a.blocks.sum(squares).sqrt() for squares in partials[1:])
    r = torch.where(u > 0, (up / u).clamp(max=1.0), 1.0)
    f = torch.where(hyper[:, Hyper.WEIGHT_DECAY] > 0, f * r + 1 - r, f)
    rates[:, Rate.UNCLIPPED] = torch.where(rates[:, Rate.COUNT] > 0, f, 1.0)
    f = f.clamp(hyper[:, Hyper.FACTOR_MIN], hyper[:, Hyper.FACTOR_MAX])
    last = rates[:, Rate.FACTOR].clone()
    f = f.clamp(last * hyper[:, Hyper.THRESHOLD_LOW], last * hyper[:, Hyper.THRESHOLD_HIGH])
    f = torch.where(rates[:, Rate.COUNT] > 0, f, 1.0)
    correction = torch.where(hyper[:, Hyper.COEFF_BIAS_CORRECTION] != 0, rates[:, Rate.COEFF_CORRECTION], 1.0)
    trust = torch.where((p == 0) | (u == 0), 1.0, (p / u).clamp(hyper[:, Hyper.MIN_COEFF], hyper[:, Hyper.MAX_COEFF]))
    used = (rates[:, Rate.COEFF] / correction * f).minimum(hyper[:, Hyper.MAX_RATE_RATIO] * trust)
    rates[:, Rate.STEP] += 1
    rates[:, Rate.FACTOR], rates[:, Rate.COEFF_USED], rates[:, Rate.RATE] = f, used, hyper[:, Hyper.LR] * used
    return {"rates": rates}


def compressed_apply(a: Any) -> dict[str, Tensor]:
    p, v, (one, two) = a.params.gather(a.blocks).double(), _shaped(a, a.exp_avg_sq), _corrections(a, advance=False)
    denominator = (v.abs() / two).sqrt() + _column(a, "hyper", Hyper.EPS)
    up = torch.where(v > 0, _momentum(a, a.new_messages) / one / denominator, 0.0)
    return _parameters(a, p - _column(a, "rates", Rate.RATE) * (up + _column(a, "hyper", Hyper.WEIGHT_DECAY) * p))


FORMULAS: dict[str, Callable[[Any], dict[str, Tensor]]] = {
    formula.__name__: formula
    for formula in (
        flatten_gradients, gradient_norms, decide_averaged, clip_local, lamb_moments, trust_ratio, lamb_apply,
        compress_momentum, seal_worker, undo_momentum, reduce_chunk, seal_server, fresh_variance, soft_threshold_rate,
        compressed_apply,
    )
}  # fmt: skip
"""Pass -> its formula. Those that look at words of messages have none: they round nothing."""
