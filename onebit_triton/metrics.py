"""What there is to see of a replica, as plain numbers and lists. Synchronises."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

from .kernels.tables import Clip, Decision, Hyper, Rate
from .kernels.variance_reference import running_trust_ratio
from .stages import Compression, Replica, Uncompressed, Warmup, pending_error

BOUNDS = ("max_coeff", "min_coeff", "max_rate_ratio", "factor_max", "factor_min", "threshold_high", "threshold_low")
"""What can clip a layer: the first two its trust ratio in warmup; in compression the third its rate, the others f."""

KEPT = 64
"""Measurements of |v| kept for each 1 / (1 - beta2) steps: the lag is exact to a part in so many."""


class VarianceHistory:
    """Norm of every layer's variance at earlier calls of `metrics`, to compare with; forgotten when a warmup begins."""

    def __init__(self) -> None:
        self._seen: deque[tuple[int, Tensor]] = deque()

    def stability(self, step: int, norms: Tensor, one_minus_beta2: Tensor) -> list[float | None]:
        """|v|_1 over what it was 1 / (1 - beta2) steps ago, per layer; None where it was not measured so long ago.

        The rule of 1-bit Adam (Tang et al., arXiv 2102.02888), whose authors freeze v where this has reached 0.96.

        Args:
            step: counted steps.
            norms: fp64 [layers], |v|_1 over 1 - beta2^k after k steps, so that v filling up is not taken for growth.
            one_minus_beta2: fp64 [layers].
        """
        shares = one_minus_beta2.tolist()
        if not all(shares):  # the table is filled in by the first step
            return [None] * len(shares)
        lags = [max(1, round(1 / share)) for share in shares]
        if not lags:
            return []
        if not self._seen or step >= self._seen[-1][0] + max(1, min(lags) // KEPT):
            self._seen.append((step, norms))
        while len(self._seen) > 1 and self._seen[1][0] <= step - max(lags):
            self._seen.popleft()
        before = {lag: next((old for at, old in reversed(self._seen) if at <= step - lag), None) for lag in set(lags)}
        ratios = {lag: _ratios(norms, old) for lag, old in before.items() if old is not None}
        return [ratios[lag][layer] if lag in ratios else None for layer, lag in enumerate(lags)]


def collect_metrics(
    replica: Replica, stage: Warmup | Uncompressed | Compression, last_stage: str | None, history: VarianceHistory
) -> dict[str, Any]:
    """Numbers of one replica; the keys are described at `OneBitLamb.metrics`."""
    decision, rates, hyper = replica.decision.tolist(), replica.rates.cpu(), replica.hyper.cpu()
    traffic, layout = replica.communicator.traffic, replica.layout
    taking_part = int(rates[:, Rate.COUNT].double().sum())
    errors, sent = _errors_and_momenta(replica)
    exchange_seconds, pass_seconds = replica.communicator.clock.read()
    clipped_by = _clipped_by(rates, hyper, last_stage)
    whole, whole_sent = float(errors.sum()), float(sent.sum())
    return {
        "stage": stage.name,
        "last_stage": last_stage,
        "step": decision[Decision.COUNTED],
        "skipped_steps": decision[Decision.SKIPPED],
        "ranks": replica.communicator.ranks,
        "bytes_sent": dict(traffic.sent),
        "bytes_saved": {name: traffic.whole[name] - sent for name, sent in traffic.sent.items()},
        "bytes_sent_last_step": traffic.last_step,
        "bytes_saved_last_step": traffic.last_whole - traffic.last_step,
        "exchange_seconds": exchange_seconds,
        "pass_seconds": pass_seconds,
        "elements": layout.elements,
        "padded_elements": layout.padded_elements,
        "masked_elements": layout.elements - taking_part if stage.name == "compression" else 0,
        "state_bytes": sum(tensor.nbytes for tensor in replica.held() + stage.held()),
        "error_ratio": (whole / whole_sent) ** 0.5 if whole_sent > 0 else 0.0,
        "grad_scale": float(replica.clip[Clip.GRAD_SCALE] / replica.clip[Clip.UNSCALE]),
        "clipped": {bound: clipped_by.count(bound) for bound in BOUNDS},
        "layers": [name for names in replica.names for name in names],
        "trust_ratio": rates[:, Rate.COEFF_USED].tolist(),
        "factor": rates[:, Rate.FACTOR].tolist(),
        "scaling": rates[:, Rate.SCALING].tolist(),
        "unclipped": rates[:, Rate.UNCLIPPED].tolist(),
        "clipped_by": clipped_by,
        "layer_error_ratio": [ratio or 0.0 for ratio in _ratios(errors.sqrt(), sent.sqrt())],
        "variance_stability": history.stability(
            decision[Decision.COUNTED], replica.variance_norms().cpu(), hyper[:, Hyper.ONE_MINUS_BETA2].double()
        ),
        "fresh_variance_ratio": _fresh_variance_ratio(replica, len(rates)),
    }


def _ratios(above: Tensor, below: Tensor) -> list[float | None]:
    """Quotients; None for division by zero."""
    return [a / b if b > 0 else None for a, b in zip(above.tolist(), below.tolist(), strict=True)]


def _over_buckets(sums: list[Tensor]) -> Tensor:
    return torch.cat(sums).cpu() if sums else torch.zeros(0, dtype=torch.float64)


def _errors_and_momenta(replica: Replica) -> tuple[Tensor, Tensor]:
    """Squares of the norms of this rank's pending errors, and of the momenta that it sent, fp64 [layers] each."""
    errors, sent = [], []
    for bucket in replica.buckets:
        count = bucket.columns(Rate.COUNT).double()
        if bucket.x is None:
            errors.append(torch.zeros_like(count))
            sent.append(torch.zeros_like(count))
        else:
            errors.append(bucket.layer_sums(pending_error(bucket.x, bucket.x_scale).square_()))
            sent.append(bucket.x_scale.double().square() * count)
    return _over_buckets(errors), _over_buckets(sent)


def _clipped_by(rates: Tensor, hyper: Tensor, last_stage: str | None) -> list[str | None]:
    """Which bound gave each layer its value in the last applied step: exact, from the numbers that were compared."""
    unclipped = rates[:, Rate.UNCLIPPED]
    if last_stage is None:
        return [None] * len(unclipped)
    if last_stage == "warmup":
        value = rates[:, Rate.COEFF_USED]
        rules = [("max_coeff", value < unclipped), ("min_coeff", value > unclipped)]
    else:
        value = rates[:, Rate.FACTOR]
        bounded = unclipped.clamp(hyper[:, Hyper.FACTOR_MIN], hyper[:, Hyper.FACTOR_MAX])
        rules = [
            ("max_rate_ratio", rates[:, Rate.COEFF_USED] < running_trust_ratio(hyper, rates) * value),
            ("threshold_high", value < bounded), ("threshold_low", value > bounded),
            ("factor_max", bounded < unclipped), ("factor_min", bounded > unclipped),
        ]  # fmt: skip
    columns = [holds.tolist() for _, holds in rules]
    return [
        next((name for (name, _), held in zip(rules, columns, strict=True) if held[layer]), None)
        for layer in range(len(unclipped))
    ]


def _fresh_variance_ratio(replica: Replica, layers: int) -> list[float | None]:
    """|v'|_1 over |v|_1 where elements take part, in compression."""
    old, new = [], []
    for bucket in replica.buckets:
        if bucket.exp_avg_sq_fresh is None:
            return [None] * layers
        part = bucket.exp_avg_sq > 0
        old.append(bucket.layer_sums(bucket.exp_avg_sq * part))
        new.append(bucket.layer_sums(bucket.exp_avg_sq_fresh * part))
    return _ratios(_over_buckets(new), _over_buckets(old))
