"""What both stages work on: this process's buckets, tables and decisions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.profiler import record_function

from ..buckets import Bucket, Layout, gradient_like
from ..collectives import Communicator, ring_bytes
from ..failures import doing
from ..kernels.backends import Passes
from ..kernels.tables import Clip, Decision, Hyper, Rate, Roll, Stamp, TensorTable


@contextmanager
def phase(name: str) -> Iterator[None]:
    """A range in a profiler's trace, and what errors say that was being done; named as in ARCHITECTURE.md."""
    with doing(name), record_function(f"onebit_triton: {name}"):
        yield


class Replica:
    """Buckets and tables of one process.

    Args:
        layout: where the parameters lie.
        parameters: all parameters, in the layout's order.
        names: what errors call them.
        passes: the backend's kernels or twins.
        communicator: the process group.
        max_grad_norm: global clipping norm, or None.
        bias_correction: whether m and v are divided by 1 - beta^k.
        maximize: whether the gradients are to be followed upwards.
        gradient_dtype: what gradients are averaged in; None: the parameters' dtype.
        l1: whether signs stand for means of absolute values, instead of roots of means of squares.
        device: of all parameters.

    Attributes:
        hyper: fp32 [segments, len(Hyper)]; rates: fp32 [segments, len(Rate)]; segments in bucket order.
        norms: fp32 [blocks of all buckets], sums of squares of gradients.
        decision: int32 [len(Decision)]; clip: fp32 [len(Clip)]; local_squares: fp32 [ranks].
        stamp: int32 [len(Stamp)], what this rank's messages carry.
        answer: fp32 [ranks, len(Roll)], this rank's answer to the roll call of a warmup step, in its row.
        roll: fp32 [ranks, len(Roll)], the answers of all.
        clipping: whether gradients are clipped; bias_correction: whether moments are corrected; gradient_dtype, l1.
        buckets: the buckets.
        whole_bytes: bytes a rank would send in a step that averages whole gradients, in the parameters' dtype, by ring
            all-reduce.
    """

    def __init__(
        self,
        layout: Layout,
        parameters: list[Tensor],
        names: list[str],
        passes: Passes,
        communicator: Communicator,
        max_grad_norm: float | None,
        bias_correction: bool,
        maximize: bool,
        gradient_dtype: torch.dtype | None,
        l1: bool,
        device: torch.device,
    ) -> None:
        self.layout, self.passes, self.communicator, self.device = layout, passes, communicator, device
        self.clipping, self.bias_correction = max_grad_norm is not None, bias_correction
        self.gradient_dtype, self.l1 = gradient_dtype, l1
        segments = sum(len(bucket.parameters) for bucket in layout.buckets)
        self.hyper = torch.zeros(segments, len(Hyper), dtype=torch.float32, device=device)
        self.rates = torch.zeros(segments, len(Rate), dtype=torch.float32, device=device)
        self.rates[:, Rate.SCALING] = 1.0
        self.rates[:, Rate.FACTOR] = 1.0
        self.norms = torch.zeros(sum(b.blocks for b in layout.buckets), dtype=torch.float32, device=device)
        self.decision = torch.zeros(len(Decision), dtype=torch.int32, device=device)
        self.decision[Decision.BAD_RANK] = -1
        self.stamp = torch.zeros(len(Stamp), dtype=torch.int32, device=device)
        self.stamp[Stamp.SENDER] = communicator.rank
        self.answer = torch.zeros(communicator.ranks, len(Roll), dtype=torch.float32, device=device)
        self.roll = torch.zeros_like(self.answer)
        self.clip = torch.zeros(len(Clip), dtype=torch.float32, device=device)
        self.clip[[Clip.GRAD_SCALE, Clip.UNSCALE]] = self._sign = -1.0 if maximize else 1.0
        self._scaled = False
        self.clip[Clip.MAX_NORM] = float("inf") if max_grad_norm is None else max_grad_norm
        self.whole_bytes = sum(ring_bytes(sum(b.sizes), communicator.ranks, b.dtype.itemsize) for b in layout.buckets)
        self.local_squares = torch.zeros(communicator.ranks, dtype=torch.float32, device=device)
        self._own_squares = torch.zeros(1, dtype=torch.float32, device=device)
        self.names: list[list[str]] = []
        self.buckets: list[Bucket] = []
        segment = block = 0
        for planned in layout.buckets:
            rows = slice(segment, segment + len(planned.parameters))
            self.buckets.append(
                Bucket(
                    planned,
                    [parameters[i] for i in planned.parameters],
                    layout.block_elements,
                    self.hyper[rows],
                    self.rates[rows],
                    self.norms[block : block + planned.blocks],
                )
            )
            self.names.append([names[i] for i in planned.parameters])
            segment, block = rows.stop, block + planned.blocks

    def point_at_tensors(self) -> None:
        """Point the address tables at today's parameters and gradients.

        Raises:
            RuntimeError: if a parameter or gradient is not what the layout was planned for.
        """
        for bucket, names in zip(self.buckets, self.names, strict=True):
            bucket.check_parameters(names)
            bucket.point_at_parameters()
            bucket.grads.set([gradient_like(p, name) for p, name in zip(bucket.parameters, names, strict=True)])

    def capturing(self) -> bool:
        """Whether what is launched now is recorded in a CUDA graph instead of run."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def current_device(self) -> AbstractContextManager[object]:
        """Make the parameters' device the current one: that is where Triton launches, and on whose stream."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    def end_step(self) -> None:
        """Let go of the gradients, so that zero_grad frees them; what parameters hold now belongs to their masters."""
        for bucket in self.buckets:
            bucket.grads.release()
            bucket.note_written()

    def local_gradients(self) -> list[TensorTable]:
        """Tables of this rank's gradients as torch holds them, one per bucket."""
        return [bucket.grads for bucket in self.buckets]

    def measure(self, gradients: list[TensorTable]) -> None:
        """Write the sums of squares of all blocks of these gradients to `norms`."""
        for bucket, table in zip(self.buckets, gradients, strict=True):
            self.passes.gradient_norms(table, bucket.map, bucket.norms)

    def sum_local_squares(self) -> Tensor:
        """Sum of squares of this rank's gradients, fp32 [1]."""
        self.measure(self.local_gradients())
        return torch.sum(self.norms, 0, keepdim=True, out=self._own_squares)

    def unscale_by(self, loss_scale: Tensor | None) -> None:
        """Undo a loss scale, fp32 of one element, in whatever reads the gradients of this step; None: there is none."""
        if loss_scale is None and not self._scaled:
            return
        self._scaled = loss_scale is not None
        factors = self.clip[Clip.GRAD_SCALE], self.clip[Clip.UNSCALE]
        for factor in factors:
            if loss_scale is None:
                factor.fill_(self._sign)
            else:
                factor.copy_(loss_scale.view(()), non_blocking=True).reciprocal_().mul_(self._sign)

    def share_local_squares(self, squares: Tensor) -> None:
        """Give every rank every rank's sum of squares, unscaled; overwrites this rank's."""
        unscale = self.clip[Clip.UNSCALE]
        squares.mul_(unscale).mul_(unscale)
        self.communicator.all_gather(self.local_squares, squares).wait()

    def variance_norms(self) -> Tensor:
        """|v|_1 of every layer over 1 - beta2^k, so that v filling up is not taken for growth; of v' in compression.

        fp64 [segments], on the parameters' device.
        """
        filled = 1 - self.hyper[:, Hyper.BETA2].double() ** self.rates[:, Rate.STEP].double()
        moving = [b.exp_avg_sq if b.exp_avg_sq_fresh is None else b.exp_avg_sq_fresh for b in self.buckets]
        sums = [bucket.layer_sums(v.abs()) for bucket, v in zip(self.buckets, moving, strict=True)]
        return torch.where(filled > 0, torch.cat(sums) / filled, 0.0) if sums else filled

    def held(self) -> list[Tensor]:
        """Every tensor whose size grows with the parameters."""
        return [tensor for bucket in self.buckets for tensor in bucket.held()]
