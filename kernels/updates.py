"""What a bucket's last passes do together: update, then rate, then apply, one bucket before the next.

Bucket by bucket, so that the second read of the moments and parameters can come from the cache; the apply passes walk
backwards, so that of a bucket larger than the cache it is the part that is still there.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .tables import BlockMap, TensorTable


def lamb_update(
    passes: Any,
    params: TensorTable,
    copies: TensorTable | None,
    grads: TensorTable,
    blocks: BlockMap,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    hyper: Tensor,
    rates: Tensor,
    clip: Tensor,
    decision: Tensor,
    partials: Tensor,
    bias_correction: bool,
) -> None:
    """`lamb_moments`, `trust_ratio`, `lamb_apply`; arguments as there. partials is fp32 [2, blocks], scratch."""
    passes.lamb_moments(
        params, grads, blocks, exp_avg, exp_avg_sq, hyper, rates, clip, decision, partials, bias_correction
    )
    passes.trust_ratio(blocks, partials, hyper, rates, decision)
    passes.lamb_apply(params, copies, blocks, exp_avg, exp_avg_sq, hyper, rates, decision, bias_correction)


def compressed_update(
    passes: Any,
    params: TensorTable,
    copies: TensorTable | None,
    grads: TensorTable | None,
    blocks: BlockMap,
    old_messages: Tensor,
    new_messages: Tensor,
    exp_avg: Tensor | None,
    exp_avg_sq: Tensor,
    exp_avg_sq_fresh: Tensor,
    hyper: Tensor,
    rates: Tensor,
    clip: Tensor,
    decision: Tensor,
    partials: Tensor,
    bias_correction: bool,
) -> None:
    """`fresh_variance`, `soft_threshold_rate`, `compressed_apply`; arguments as there.

    partials is fp32 [4, blocks], scratch. Afterwards old_messages hold what new_messages held, unless the step is
    skipped: the momentum is up to date.
    """
    passes.fresh_variance(
        params, grads, blocks, old_messages, new_messages, exp_avg, exp_avg_sq, exp_avg_sq_fresh, hyper, rates, clip,
        decision, partials, bias_correction,
    )  # fmt: skip
    passes.soft_threshold_rate(blocks, partials, hyper, rates, decision)
    passes.compressed_apply(
        params, copies, blocks, old_messages, new_messages, None if grads is None else exp_avg, exp_avg_sq, hyper,
        rates, decision, bias_correction,
    )  # fmt: skip
