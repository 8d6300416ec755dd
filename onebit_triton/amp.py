"""What the optimizer and torch's GradScaler tell each other, without waiting for the device.

A scaler that finds `_step_supports_amp_scaling` calls `step(grad_scaler=scaler)` and leaves everything to it: it is the
older of torch's two protocols for this, and the only one in which the scaler can learn that another rank overflowed.
"""

from __future__ import annotations

import warnings

from torch import Tensor
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from .kernels.tables import Decision

# Said to every user at every step, though only this package could act on it.
warnings.filterwarnings("ignore", "GradScaler is going to stop passing itself", FutureWarning)


def pending_scale(scaler: GradScaler, optimizer: Optimizer) -> Tensor | None:
    """The scale that is still on an optimizer's gradients, fp32 [1] or []; None after `scaler.unscale_(optimizer)`."""
    if scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED:
        return None
    return scaler._get_scale_async()


def tell_skipped(scaler: GradScaler, optimizer: Optimizer, decision: Tensor) -> None:
    """Tell a scaler, for its next `update`, whether the step was skipped: on one rank is on all.

    Args:
        scaler: the scaler.
        optimizer: whose step it was.
        decision: int32 [len(Decision)].
    """
    skipped = decision[Decision.SKIP].float()
    scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {skipped.device: skipped}
