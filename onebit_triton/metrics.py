"""What there is to see of a replica, as plain numbers and lists. Synchronises."""

from __future__ import annotations

from typing import Any

from .kernels.tables import Clip, Decision, Rate
from .stages import Compression, Replica, Uncompressed, Warmup, pending_error


def collect_metrics(replica: Replica, stage: Warmup | Uncompressed | Compression) -> dict[str, Any]:
    """Numbers of one replica; the keys are described at `OneBitLamb.metrics`."""
    decision, rates = replica.decision.tolist(), replica.rates.cpu()
    traffic, layout = replica.communicator.traffic, replica.layout
    taking_part = int(rates[:, Rate.COUNT].double().sum())
    error = sent = 0.0
    for bucket in replica.buckets:
        if bucket.x is not None:
            error += float(pending_error(bucket.x, bucket.x_scale).square().sum())
            sent += float(bucket.x_scale.square() * bucket.count)
    return {
        "stage": stage.name,
        "step": decision[Decision.COUNTED],
        "skipped_steps": decision[Decision.SKIPPED],
        "bytes_sent": dict(traffic.sent),
        "bytes_sent_last_step": traffic.last_step,
        "elements": layout.elements,
        "padded_elements": layout.padded_elements,
        "masked_elements": layout.elements - taking_part if stage.name == "compression" else 0,
        "state_bytes": sum(tensor.nbytes for tensor in replica.held() + stage.held()),
        "error_ratio": (error / sent) ** 0.5 if sent > 0 else 0.0,
        "grad_scale": float(replica.clip[Clip.GRAD_SCALE] / replica.clip[Clip.UNSCALE]),
        "layers": [name for names in replica.names for name in names],
        "trust_ratio": rates[:, Rate.COEFF_USED].tolist(),
        "factor": rates[:, Rate.FACTOR].tolist(),
        "scaling": rates[:, Rate.SCALING].tolist(),
    }
