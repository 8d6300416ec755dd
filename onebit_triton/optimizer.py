"""OneBitLamb: parameters, groups, stages and what users call. The arithmetic is in kernels/, the order in stages/."""

from __future__ import annotations

import copy
import logging
import math
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload
from weakref import WeakSet, WeakValueDictionary

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer

from . import checkpoint, drift
from .amp import pending_scale, tell_skipped
from .buckets import fingerprint, plan_layout
from .collectives import Communicator, DeviceMesh, ProcessGroup, SharedGroup
from .ddp import GradientHook, install_hook
from .failures import doing
from .hashing import hash_values
from .hyperparameters import HyperTable, difference
from .interrupts import signals_deferred
from .kernels.backends import load_passes
from .kernels.tables import Decision, Fault
from .metrics import VarianceHistory, collect_metrics
from .monitor import Monitor, fault_message
from .options import check_group, check_optimizer, check_parameter, check_steps
from .settling import LOOKS, Look, Settling, lag_of
from .stages import Compression, Replica, Uncompressed, Warmup, freeze, phase, thaw
from .stages.switch import NOT_CONTRACTING, consolidate, expected_error_ratio, mask_variance, stage_two

logger = logging.getLogger("onebit_triton")

P = ParamSpec("P")
R = TypeVar("R")


def uninterrupted(method: Callable[Concatenate[OneBitLamb, P], R]) -> Callable[Concatenate[OneBitLamb, P], R]:
    """Let signals wait for the end of a method, and leave word for the other ranks if it fails on this one."""
    name = method.__name__.strip("_")

    @wraps(method)
    def call(self: OneBitLamb, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with signals_deferred(), self._communicator.watch.guard(name), torch.no_grad():
            return method(self, *args, **kwargs)

    return call


class OneBitLamb(Optimizer):
    r"""1-bit LAMB (Li et al., arXiv 2104.06069): LAMB that, after a warmup, sends one bit per parameter and step.

    Warmup, `freeze_step` steps, on gradients averaged over ranks::

        m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  u = m / (sqrt(v) + eps) + wd p
        c = clamp(|p| / |u|, min_coeff, max_coeff)      per tensor;  C is the running mean of c
        p -= lr c u

    Compression, on local gradients: v and C are frozen; m is exchanged as signs with one scale per bucket and chunk,
    with error feedback on workers and servers; v' follows the gradient reconstructed from m, and the layer rate is
    lr C f, f = max (sqrt(v)+eps)/(sqrt(v')+eps) between its clamps and soft thresholds.

    A step in which any rank has a non-finite gradient is skipped on all ranks. A missing gradient counts as zero.
    Elements that never saw a gradient (v = 0 at the switch) move by weight decay alone afterwards.

    All arithmetic and state is fp32. Parameters may be fp32, bf16 or fp16; of the latter two the optimizer keeps fp32
    masters, 4 bytes per parameter, and writes them rounded. A master follows what others write to its parameter.

    Every call that is marked collective must be made by all ranks of the process group. So must copying it (by
    copy.deepcopy or pickle): the copy stands where the original does, but is attached to no model and has no hooks.

    Args:
        params: tensors, param groups, or named parameters. All on one device.
        lr: learning rate; a float or a tensor of one element.
        freeze_step: number of warmup steps, at least 1. Skipped steps do not count. "auto": the warmup ends when the
            variance and the trust ratios are what they were 1/(1-beta2) steps before and no learning rate rises.
        max_freeze_step: with "auto", the most warmup steps; else None.
        betas: decay of m and of v, v'.
        eps: added to sqrt(v), outside the root.
        weight_decay: decoupled, inside the trust ratio.
        bias_correction: divide m and v by 1 - beta^k in warmup; the factors stay at their last values afterwards.
        max_coeff, min_coeff: clamps of the trust ratio.
        coeff_beta: decay of the running trust ratio C.
        coeff_bias_correction: use C / (1 - coeff_beta^k); False is what DeepSpeed computed.
        factor_max, factor_min: clamps of f.
        factor_threshold: f moves at most by this share a step.
        max_rate_ratio: in compression C f is at most so many times the trust ratio that LAMB would use; inf as in the
            paper.
        maximize: climb instead of descending.
        max_grad_norm: global norm to clip at; in compression the same on all ranks. None: off.
        gradient_dtype: what gradients are averaged in during warmup: torch.bfloat16 or float16 halve its traffic,
            float8_e4m3fn (with a scale for every 256 elements) quarters it. A gradient too large for fp16 skips the
            step, one too small is lost. None: the parameters' dtype.
        scale: what a sign stands for in compression: "rms", the root of the mean square, as in the paper; or "l1", the
            mean absolute value, with which errors cannot grow without end however unequal the elements are.
        max_skipped_steps: so many skipped steps in a row are an error.
        check_replicas_every: call `check_replicas` in every so many steps. None: never.
        process_group: the ranks that share these parameters, as a group or a DeviceMesh of one dimension. None means
            the default group when torch.distributed is initialised, else a single process.
        backend: "triton", "torch", "inductor" (torch's passes compiled: the fast one on a CPU), or "auto" (triton on
            CUDA, torch elsewhere). All give the same trajectory.
        bucket_elements: about how many elements share a bucket, its launches and its messages.
        block_elements: elements of a block, a power of two from 64 to 4096; tensors are padded to it. Larger wastes
            more on small tensors. Like bucket_elements, the same on all ranks.

    Raises:
        ValueError: for bad input, naming the argument, the rule and the value.
        RuntimeError: if ranks do not agree on the parameters or options, naming the rank; or if "inductor" finds no C++
            compiler on a CPU.
        ImportError: if Triton is asked for and absent.

    Example:
        >>> optimizer = OneBitLamb(model.parameters(), lr=4e-3, freeze_step=2000)
        >>> model = optimizer.attach(DistributedDataParallel(model))
    """

    _step_supports_amp_scaling = True
    """Tells torch's GradScaler to leave unscaling and skipping to `step`."""

    _built = False
    _replayed = False
    _consolidated = False
    _warned = False
    _last_stage: str | None = None
    _replica: Replica
    _stage: Warmup | Uncompressed | Compression

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        freeze_step: int | Literal["auto"] = 2000,
        max_freeze_step: int | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        bias_correction: bool = False,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        coeff_bias_correction: bool = True,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        max_rate_ratio: float = math.inf,
        maximize: bool = False,
        max_grad_norm: float | None = None,
        gradient_dtype: torch.dtype | None = None,
        scale: Literal["rms", "l1"] = "rms",
        max_skipped_steps: int = 100,
        check_replicas_every: int | None = None,
        process_group: ProcessGroup | DeviceMesh | None = None,
        backend: str = "auto",
        bucket_elements: int = 4 * 1024 * 1024,
        block_elements: int = 1024,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "max_coeff": max_coeff,
            "min_coeff": min_coeff, "coeff_beta": coeff_beta, "factor_max": factor_max, "factor_min": factor_min,
            "factor_threshold": factor_threshold, "max_rate_ratio": max_rate_ratio, "exp_avg_mask": None,
        }  # fmt: skip
        self._communicator = Communicator(process_group)
        # By id, in the order of attach. A hook belongs to its model, and lives as long; it holds the optimizer.
        self._hooks: WeakValueDictionary[int, GradientHook] = WeakValueDictionary()
        self._models: WeakSet[torch.nn.Module] = WeakSet()
        self._attached: set[Tensor] = set()
        self._attached_all = False
        self._freeze_step, self._max_freeze_step = freeze_step, max_freeze_step
        self._max_grad_norm, self._gradient_dtype, self._scale = max_grad_norm, gradient_dtype, scale
        self._max_skipped_steps, self._check_replicas_every = max_skipped_steps, check_replicas_every
        self._flags = {
            "bias_correction": bias_correction, "coeff_bias_correction": coeff_bias_correction, "maximize": maximize,
        }  # fmt: skip
        self._block_elements, self._bucket_elements, self._backend = block_elements, bucket_elements, backend
        self._calls = self._warmup_base = 0
        failure: Exception | None = None
        try:
            check_optimizer(
                freeze_step, max_freeze_step, max_grad_norm, gradient_dtype, scale, max_skipped_steps,
                check_replicas_every, bucket_elements, block_elements, **self._flags,
            )  # fmt: skip
            self._plan_warmup()
            super().__init__(params, defaults)
            if not self._parameters():
                raise ValueError("Invalid params: must contain at least one parameter, got only empty groups.")
            self._passes = load_passes(backend, self._parameters()[0].device)
        except Exception as error:
            failure = error
        with doing("construction"):
            self._communicator.raise_together(failure, "construct the optimizer")
            self._build()

    def __reduce__(self) -> tuple[Any, ...]:
        """How copy and pickle make another: built over the (copied) parameters, loaded with the state."""
        groups = [
            {**group, "params": list(zip(group["param_names"], group["params"], strict=True))}
            if "param_names" in group
            else group
            for group in self.param_groups
        ]
        options = {
            **self.defaults, **self._flags, "freeze_step": self._freeze_step,
            "max_freeze_step": self._max_freeze_step, "max_grad_norm": self._max_grad_norm,
            "gradient_dtype": self._gradient_dtype, "scale": self._scale,
            "max_skipped_steps": self._max_skipped_steps, "check_replicas_every": self._check_replicas_every,
            "backend": self._backend, "bucket_elements": self._bucket_elements, "block_elements": self._block_elements,
        }  # fmt: skip
        del options["exp_avg_mask"]
        return _rebuild, (type(self), groups, options, SharedGroup(self._communicator.group), self.state_dict())

    # Parameters and layout

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def _names(self, first_group: int = 0) -> list[str]:
        """What errors call the parameters of the groups from `first_group` on."""
        names = []
        for index, group in enumerate(self.param_groups[first_group:], first_group):
            given = group.get("param_names")
            names += [
                f"parameter {given[number]}" if given else f"parameter {number} of group {index}"
                for number in range(len(group["params"]))
            ]
        return names

    @uninterrupted
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters in warmup, on all ranks alike (collective: the new layout is agreed on).

        Raises:
            RuntimeError: in compression, where the new parameters would have no variance to freeze; or if ranks do not
                agree on them.
            ValueError: for bad input; the optimizer stays as it was.
        """
        if self._built and self.stage == "compression":
            raise RuntimeError(
                "add_param_group is refused in the compression stage: new parameters need a warmup. "
                "Call rewarm(steps) first."
            )
        index = len(self.param_groups)
        try:
            failure: Exception | None = None
            try:
                super().add_param_group(param_group)
                group = self.param_groups[index]
                check_group(group, index)
                parameters = self._parameters()
                for parameter, name in zip(group["params"], self._names(index), strict=True):
                    check_parameter(parameter, name, parameters[0].device)
            except Exception as error:
                failure = error
            if self._built:
                self._communicator.raise_together(failure, "add a param group")
                self._build()
            elif failure is not None:
                raise failure
        except Exception:
            del self.param_groups[index:]
            raise

    def _build(self, fresh: bool = False) -> Replica:
        """Plan the layout, agree on it with all ranks, and allocate the warmup state (collective).

        State of parameters that were there before is kept, unless it is to be fresh.
        """
        parameters = self._parameters()
        layout = plan_layout(parameters, self._block_elements, self._bucket_elements, self._communicator.ranks)
        shapes = [(tuple(p.shape), str(p.dtype)) for p in parameters]
        self._communicator.agree(
            {
                "the number of parameter tensors": len(parameters),
                "the number of parameter elements": sum(p.numel() for p in parameters),
                "the layout (block_elements, bucket_elements, tensor order)": layout.fingerprint,
                "the parameters' shapes and dtypes": fingerprint(shapes),
                'whether freeze_step is "auto"': int(self._freeze_step == "auto"),
                "freeze_step": 0 if self._freeze_step == "auto" else self._freeze_step,
                "max_freeze_step": self._max_freeze_step or 0,
                "the options of the optimizer": fingerprint(
                    self._max_grad_norm,
                    self._gradient_dtype,
                    self._scale,
                    self._max_skipped_steps,
                    self._check_replicas_every,
                    sorted(self._flags.items()),
                ),
            }
        )
        previous = self._replica if self._built and not fresh else None
        self._replica = Replica(
            layout, parameters, self._names(), self._passes, self._communicator, self._max_grad_norm,
            self._flags["bias_correction"], self._flags["maximize"], self._gradient_dtype, self._scale == "l1",
            parameters[0].device,
        )  # fmt: skip
        if previous is not None:
            checkpoint.carry_over(previous, self._replica)
        group_of = [index for index, group in enumerate(self.param_groups) for _ in group["params"]]
        segments = [group_of[i] for bucket in layout.buckets for i in bucket.parameters]
        self._hyper = HyperTable(self._replica, segments, self._flags["coeff_bias_correction"])
        self._monitor = Monitor(self._replica)
        self._last_stage = None
        self._enter(Warmup(self._replica))
        self._attached_all = False
        self._built = True
        return self._replica

    # Stages

    def _plan_warmup(self) -> None:
        """How long the first warmup is, and when its end is looked at."""
        self._settling: Settling | None = None
        if isinstance(self._freeze_step, int):
            self._warmup_steps = self._check_at = self._freeze_step
        else:
            assert self._max_freeze_step is not None
            self._warmup_steps, self._check_at, self._settling = self._max_freeze_step, 1, Settling()

    @property
    def stage(self) -> str:
        """What the next step will do: "warmup" or "compression"."""
        return self._stage.name

    def _enter(self, stage: Warmup | Uncompressed | Compression) -> None:
        self._stage, self._consolidated = stage, False
        if isinstance(stage, Warmup):
            self._variances = VarianceHistory()
        self._communicator.traffic.stage = self._communicator.watch.stage = stage.name
        self._communicator.traffic.start_step()
        for hook in self._hooks.values():
            hook.averaging = stage.name == "warmup"
        self._publish_state()

    def _publish_state(self) -> None:
        """Show the dense state in `self.state`, as views: what torch's tools expect to find there."""
        self.state = defaultdict(dict)
        for bucket in self._replica.buckets:
            shown = {"exp_avg_sq": bucket.exp_avg_sq}
            if bucket.master is not None:
                shown["master"] = bucket.master
            if self.stage == "warmup":
                assert bucket.exp_avg is not None
                shown["exp_avg"] = bucket.exp_avg
            elif bucket.exp_avg_sq_fresh is not None:
                shown["exp_avg_sq_fresh"] = bucket.exp_avg_sq_fresh
            for key, value in shown.items():
                for parameter, view in zip(bucket.parameters, bucket.views(value), strict=True):
                    self.state[parameter][key] = view

    @overload
    def step(self, closure: None = None, *, grad_scaler: GradScaler | None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float], *, grad_scaler: GradScaler | None = None) -> float: ...

    def step(
        self, closure: Callable[[], float] | None = None, *, grad_scaler: GradScaler | None = None
    ) -> float | None:
        """Take one step (collective).

        A step can be captured in a CUDA graph and replayed, in either stage: after one step of that stage on the
        same gradients, which stay where they are; lr may be a tensor on the device that is filled in place. The
        switch to compression happens in the first step that is not a replay and is due; capture again after it.

        Args:
            closure: reevaluates the model and returns the loss, which nothing here uses: ranks may have different ones.
            grad_scaler: what `scaler.step(optimizer)` passes. Gradients are unscaled as they are first read; the scaler
                is told whether any rank had to skip, so that its scale stays equal on all ranks.

        Returns:
            What the closure returned, else None.

        Raises:
            RuntimeError: for a gradient that cannot be used; if another layout's message arrived; or, on all ranks
                after the same step, if max_skipped_steps were skipped in a row: the step is done, and changed nothing.
        """
        loss = None
        if closure is not None:
            with self._communicator.watch.guard("step"), doing("closure"), torch.enable_grad():
                loss = closure()
        self._step(grad_scaler)
        return loss

    @uninterrupted
    def _step(self, grad_scaler: GradScaler | None) -> None:
        """Take one step with the gradients that are there."""
        replica, clock = self._replica, self._communicator.clock
        seen: list[int] | None = None
        failure: Exception | None = None
        with replica.current_device():
            capturing = replica.capturing()
            if not capturing:
                clock.start(replica.device.type == "cuda")
            try:
                self._hyper.refresh(self.param_groups)
                replica.point_at_tensors()
                replica.unscale_by(self._loss_scale(grad_scaler))
                squares, roll = self._averaged_by_hooks()
            except Exception as error:
                failure = error
                self._abstain(error)
            else:
                if isinstance(self._stage, Warmup):
                    if roll is None and self._communicator.ranks > 1:
                        self._hyper.answer(self.param_groups, self._calls)
                    self._stage.step(squares, roll)
                else:
                    self._stage.step()
            if grad_scaler is not None:
                tell_skipped(grad_scaler, self, replica.decision)
            if not capturing:
                clock.stop()
                seen = self._monitor.observe()
        self._consolidated = False
        replica.end_step()
        if capturing:
            self._replayed = True
            return
        self._communicator.traffic.end_step(replica.whole_bytes)
        self._last_stage = self.stage
        self._calls += 1
        try:
            if failure is not None:
                raise failure
            if seen is not None:
                self._monitor.log(seen)
                self._raise_at_fault(seen)
                self._raise_if_stuck(seen)
        finally:
            for hook in self._hooks.values():
                hook.reset()
        if self.stage == "warmup":
            self._count_replays()
            if self._calls >= self._check_at:
                self._end_warmup()
        if self._check_replicas_every is not None and self._calls % self._check_replicas_every == 0:
            self.check_replicas()
        self._communicator.watch.end_step(self._calls)

    def _abstain(self, error: Exception) -> None:
        """Let the other ranks skip a step that this rank cannot take; raise at once where they do not wait for it."""
        stage, alone = self._stage, self._communicator.ranks == 1 or self._replica.capturing()
        if alone or isinstance(stage, Uncompressed) or (isinstance(stage, Warmup) and self._hooks):
            raise error
        stage.abstain()

    def _raise_at_fault(self, seen: list[int]) -> None:
        """Raise if ranks had to skip a step for another reason than gradients: on all of them, after the same step."""
        if not seen[Decision.FAULT] & ~Fault.NONFINITE:
            return
        message = fault_message(seen)
        if message is None:
            differs = difference(self._communicator, self.param_groups, self._calls)
            told = differs or f"rank {seen[Decision.BAD_RANK]} had others in this step than rank 0 had"
            message = (
                f"No rank has applied this step: ranks do not agree on hyperparameters or steps: {told}. Every rank "
                "must set the same ones, and call step() equally often."
            )
        raise RuntimeError(f"Rank {self._communicator.rank}: {message}")

    def _raise_if_stuck(self, seen: list[int]) -> None:
        """Give up after too many skipped steps in a row, saying where the gradients are not finite."""
        streak = seen[Decision.STREAK]
        for hook in self._hooks.values():  # whose gradients they are cannot be seen once DDP has averaged them
            hook.measuring = self._max_grad_norm is not None or streak > 0
        if streak < self._max_skipped_steps:
            return
        bad = [
            name
            for parameter, name in zip(self._parameters(), self._names(), strict=True)
            if parameter.grad is not None and not parameter.grad.float().square().isfinite().all()
        ]
        squares, averaged = self._averaged_by_hooks()
        mine = bool(bad) if averaged is None else squares is not None and not squares.isfinite()
        culprits = [rank for rank, (flag,) in enumerate(self._communicator.gather_numbers([int(mine)])) if flag]
        here = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "") if bad else "none of them"
        whose = f", the last because of rank {', '.join(map(str, culprits))}" if culprits else ""
        raise RuntimeError(
            f"Rank {self._communicator.rank}: {streak} steps in a row were skipped for gradients that are not finite"
            f"{whose}. On this rank they are those of: {here}. Parameters and state are as they were before. Lower the "
            "learning rate or the loss scale, look at the data of these steps, or raise "
            f"max_skipped_steps={self._max_skipped_steps}."
        )

    def _loss_scale(self, grad_scaler: GradScaler | None) -> Tensor | None:
        """By what the gradients are scaled, if they are; wrapped optimizers find it in an attribute, set for a step."""
        return getattr(self, "grad_scale", None) if grad_scaler is None else pending_scale(grad_scaler, self)

    def _count_replays(self) -> None:
        """Count the steps that replays of a CUDA graph have taken: only the device knows of them."""
        if self._replayed:
            decision = self._replica.decision.tolist()
            self._calls = decision[Decision.COUNTED] + decision[Decision.SKIPPED]

    def _averaged_by_hooks(self) -> tuple[Tensor | None, Tensor | None]:
        """What DDP's hooks have seen of this step.

        Returns:
            Sum of squares of the gradients before they were averaged, if measured; and the roll call, None unless DDP
            has averaged every gradient of this step: averaging them once more would change nothing.
        """
        measured = [hook.squares for hook in self._hooks.values() if hook.squares is not None]
        squares = torch.stack(measured).sum() if measured else None
        if not self._hooks or not all(hook.averaged for hook in self._hooks.values()):
            return squares, None
        if not self._attached_all:
            for parameter, name in zip(self._parameters(), self._names(), strict=True):
                if parameter.requires_grad and parameter not in self._attached:
                    raise RuntimeError(
                        f"{name} belongs to no attached model, so nothing averages its gradient: attach every DDP "
                        "model whose parameters this optimizer has, or none."
                    )
            self._attached_all = True
        return squares, next(self._hooks.values()).roll

    def _masks(self) -> dict[Tensor, Tensor]:
        """Parameter -> the user's mask, where there is one."""
        return {
            parameter: group["exp_avg_mask"].to(parameter.device)
            for group in self.param_groups
            if group["exp_avg_mask"] is not None
            for parameter in group["params"]
        }

    def _end_warmup(self) -> None:
        """Switch to compression if enough steps counted, or all has settled; skipped ones are made up for.

        Reads the device. What has settled is rank 0's to say: others may have summed up in another order.
        """
        replica, reason = self._replica, None
        counted = int(replica.decision[Decision.COUNTED])
        missing = self._warmup_base + self._warmup_steps - counted
        ends, wait = missing <= 0, missing
        if not ends and self._settling is not None:
            lag = lag_of(self.param_groups)
            wait = min(missing, max(1, lag // LOOKS))
            with doing("settling"):
                reason = self._settling.settled(Look.take(replica, counted, self.param_groups), lag)
                ends = bool(self._communicator.gather_numbers([int(reason is not None)])[0][0])
        if not ends:
            self._check_at = self._calls + wait
            return
        self._warmup_steps, self._settling = counted - self._warmup_base, None
        before = self._communicator.traffic.last_step
        with phase("switch"):
            self._enter(freeze(replica, self._masks()))
        if self._communicator.rank == 0:
            after = self._stage.exchange.step_bytes if isinstance(self._stage, Compression) else 0
            logger.info(
                "step %d: warmup ends, compression begins; bytes sent per step and rank: %s before, %s after%s",
                self._calls, f"{before:,}", f"{after:,}", f" ({before / after:.1f}x less)" if before and after else "",
            )  # fmt: skip
            if reason is not None:
                logger.info("step %d: the warmup has ended by itself: %s", self._calls, reason)
        if isinstance(self._stage, Compression) and not replica.l1:
            self._warn_of_errors(expected_error_ratio(replica))

    def _warn_of_errors(self, ratio: float) -> None:
        """Say once that the momentum is too unequal for its scale, if it is."""
        if not self._replica.l1 and ratio > NOT_CONTRACTING and not self._warned:
            self._warned = True
            if self._communicator.rank == 0:
                logger.warning(
                    "step %d: compression leaves %.2f times the momentum behind as an error: a few elements are far "
                    'larger than the others (rare rows, heavy tails). With scale="l1" it leaves less than it had.',
                    self._calls, ratio,
                )  # fmt: skip

    @uninterrupted
    def rewarm(self, steps: int) -> None:
        """Go back to warmup for some steps, as the paper does when the sequence length changes (collective).

        The momentum becomes dense, pending errors are folded into it, v, C and counts go on; then the switch happens
        again. Call it between a step and the next backward pass.

        Args:
            steps: number of warmup steps, at least 1.

        Raises:
            ValueError: for a bad number of steps.
            RuntimeError: if the optimizer is in warmup already.
        """
        check_steps("steps", steps)
        replica = self._replica
        if isinstance(self._stage, Warmup):
            raise RuntimeError("rewarm is for the compression stage; the optimizer is still warming up.")
        self._count_replays()
        self._hyper.refresh(self.param_groups)
        self._enter(thaw(replica, self._stage))
        self._warmup_base, self._warmup_steps = int(replica.decision[Decision.COUNTED]), steps
        self._settling = None
        self._check_at = self._calls + steps
        if self._communicator.rank == 0:
            logger.info("step %d: compression ends, warming up again for %d steps", self._calls, steps)

    def attach(self, model: torch.nn.Module) -> torch.nn.Module:
        """Let a DistributedDataParallel model average gradients in warmup and leave them local afterwards.

        Args:
            model: the DDP model; its process group must have the optimizer's ranks. Call it once for every DDP model;
                a second call changes nothing.

        Returns:
            The model.

        Raises:
            TypeError: if it is not a DDP model.
            ValueError: if its process group is another one.
        """
        if model in self._models:
            return model
        hook = install_hook(
            model, self._communicator, measuring=self._max_grad_norm is not None, dtype=self._gradient_dtype,
            answer=lambda: self._hyper.answer(self.param_groups, self._calls),
        )  # fmt: skip
        hook.averaging = self.stage == "warmup"
        self._hooks[id(hook)] = hook
        self._models.add(model)
        self._attached.update(model.parameters())
        return model

    @uninterrupted
    def check_replicas(self, repair: bool = False) -> None:
        """Make sure that parameters and state are bit-identical on all ranks (collective; waits for the device).

        It reads everything once and compares hashes. Pending errors, which belong to ranks, are left out.

        Args:
            repair: give every rank what rank 0 has, and warn, instead of raising.

        Raises:
            RuntimeError: on every rank, naming the first tensor that differs, a rank, and where.
        """
        replica = self._replica
        with replica.current_device():
            found = drift.find_difference(replica, self._stage)
            if found is None or repair:
                replica.decision[Decision.DAMAGED] = 0
            if found is None:
                return
            if not repair:
                raise RuntimeError(
                    f"Replicas have drifted apart: {found} Load the last checkpoint, or call "
                    "check_replicas(repair=True) to go on with what rank 0 has."
                )
            drift.repair(replica, self._stage)
            if replica.communicator.rank == 0:
                logger.warning("replicas had drifted apart and were repaired from rank 0: %s", found)

    # Checkpoints

    @uninterrupted
    def consolidate_errors(self) -> None:
        """Give every worker the mean of all pending errors, so that one state serves any number of ranks (collective).

        Call it before `state_dict`, between two steps. Training goes on from where it leaves the errors, bit for bit as
        a run that loads the state: the mean is all of them that parameters ever see. A state saved without it continues
        the very errors of each rank, but only on as many ranks.

        In warmup, and on one rank, there are no errors; the state then has zeros in their place: the same keys in every
        stage, as torch.distributed.checkpoint needs them, which reads into the state of an optimizer that is still new.
        """
        if isinstance(self._stage, Compression) and not self._consolidated:
            consolidate(self._replica)
        self._consolidated = True

    def consolidate_state_dict(self) -> None:
        """`consolidate_errors`, by the name that torch's ZeroRedundancyOptimizer gave it (collective).

        Lightning and Fabric call it on every rank before the first one saves.
        """
        self.consolidate_errors()

    def _progress(self) -> checkpoint.Progress:
        replica = self._replica
        errors = "mean" if self._consolidated else "own" if isinstance(self._stage, Compression) else "none"
        self._count_replays()
        progress = checkpoint.Progress(
            version=checkpoint.VERSION, stage=self.stage, calls=self._calls, warmup_base=self._warmup_base,
            warmup_steps=self._warmup_steps, check_at=self._check_at, errors=errors, ranks=self._communicator.ranks,
            rank=self._communicator.rank if errors == "own" else 0, layout=replica.layout.fingerprint,
            looks=None if self._settling is None else self._settling.to_lists(),
        )  # fmt: skip
        progress.read_device(replica)
        return progress

    @uninterrupted
    def state_dict(self) -> dict[str, Any]:
        """State as torch's standard form: per parameter step, exp_avg, exp_avg_sq and so on, dense and fp32.

        In compression on several ranks it contains this rank's pending errors: save one file per rank. After
        `consolidate_errors` it is the same on every rank: save one.
        """
        shown, progress = self.state, self._progress()
        exported = checkpoint.export_state(self._replica, self._stage, self._consolidated)
        progress.tensors = checkpoint.hash_entries(exported.values())
        self.state = defaultdict(dict, exported)
        for group in self.param_groups:
            group[checkpoint.KEY] = progress.to_dict()
        try:
            return super().state_dict()
        finally:
            self.state = shown
            for group in self.param_groups:
                del group[checkpoint.KEY]

    def _saved_facts(
        self, progress: checkpoint.Progress, entries: dict[Tensor, dict[str, Any]], groups: list[dict[str, Any]]
    ) -> dict[str, int]:
        """What ranks must find alike in the states that they load: everything but pending errors."""
        values = [float(beta) for group in groups for beta in group["betas"]]
        values += [
            float(group[key]) for group in groups for key in self.defaults if key not in ("betas", "exp_avg_mask")
        ]
        masks = [group["exp_avg_mask"] for group in groups if group["exp_avg_mask"] is not None]
        shared = [entry[key] for entry in entries.values() for key in sorted(entry) if key in checkpoint.REPLICATED]
        return {
            "the saved stage": int(progress.stage == "warmup"),
            "the saved step": progress.calls,
            "the saved counts": fingerprint(sorted((progress.to_dict() | {"rank": 0, "tensors": 0}).items())),
            "the saved hyperparameters": fingerprint(values, hash_values(masks)),
            "the saved moments": fingerprint(hash_values(shared)),
        }

    @uninterrupted
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where a saved state was, in either stage (collective; nothing changes if any rank refuses).

        A state saved in warmup, by one process, or after `consolidate_errors` loads at any number of ranks, with any
        `bucket_elements` and `block_elements`; another one saved in compression by several ranks loads on the same rank
        of as many ranks with the same layout. Parameters are matched by their names, where both have such, else by
        their order.

        Raises:
            ValueError: saying why the state does not fit.
            RuntimeError: if another rank refused its state, or ranks load states of different moments.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        failure: Exception | None = None
        try:
            names = dict(zip(self._parameters(), self._names(), strict=True))
            progress, entries = checkpoint.read_state(state_dict, self.param_groups, names, self._replica)
            groups = copy.deepcopy(state_dict["param_groups"])
            for index, group in enumerate(groups):
                group.setdefault("max_rate_ratio", math.inf)  # states from before it existed
                check_group({**group, "params": self.param_groups[index]["params"]}, index)
            facts = self._saved_facts(progress, entries, groups)
        except Exception as error:  # on one rank perhaps, while the others wait
            failure = checkpoint.refusal(error)
        self._communicator.raise_together(failure, "load its state_dict")
        self._communicator.agree(facts)

        for group, saved in zip(self.param_groups, groups, strict=True):
            ours = {key: group[key] for key in ("params", "param_names") if key in group}
            del saved[checkpoint.KEY]
            group.update(saved, **ours)
        replica = self._build(fresh=True)
        checkpoint.import_dense(replica, entries, progress.stage == "compression")
        progress.write_device(replica)
        self._monitor = Monitor(replica)
        self._calls, self._check_at = progress.calls, progress.check_at
        self._communicator.watch.steps = self._calls
        self._warmup_base, self._warmup_steps = progress.warmup_base, progress.warmup_steps
        self._settling = None if progress.looks is None else Settling.from_lists(progress.looks)
        if progress.stage == "compression":
            mask_variance(replica, self._masks())
            self._enter(stage_two(replica))
            if progress.errors != "none":
                self._hyper.refresh(self.param_groups)
                checkpoint.import_errors(replica, entries)
        else:
            self._publish_state()
        self._consolidated = progress.errors == "mean"
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    # Seeing it work

    @property
    def bytes_sent(self) -> dict[str, int]:
        """Bytes this rank has sent in each stage, as counted at the collectives. Costs nothing."""
        return dict(self._communicator.traffic.sent)

    @property
    def rank(self) -> int:
        """This process's rank in the process group; 0 for a single process."""
        return self._communicator.rank

    @torch.no_grad()
    def metrics(self) -> dict[str, Any]:
        """What there is to see, as plain numbers and per-layer lists; the one call that may synchronise.

        Not collective. It reads v, v' and the pending error: on a large model call it every few steps. In a
        step that was skipped the layers' numbers are those of the last one that was not.

        **Where training stands**

        - stage: what the next step will do, "warmup" or "compression"; last_stage: what the last one did, None before
          the first, and before the first after a state was loaded.
        - step: steps applied so far; skipped_steps: steps that were not; steps_to_switch: steps until compression, or
          the most of them if it comes by itself; 0 in compression.
        - ranks: processes that train together.

        **What it costs, on this rank**

        - bytes_sent: by stage, since the optimizer was made. bytes_saved: by stage, what averaging whole gradients in
          the parameters' dtype by ring all-reduce would have sent in the same steps, less bytes_sent; in warmup a
          little below 0, since agreeing, norms and padding are sent too.
        - bytes_sent_last_step, bytes_saved_last_step: the same two of the last step, its backward pass included.
        - exchange_seconds: time of the last step() spent waiting for collectives; pass_seconds: all its other time. On
          a CPU the host's time, on CUDA the stream's, between events. What DDP exchanges in backward is in neither.
        - state_bytes: all tensors held whose size grows with the parameters, wire buffers included.
        - elements: of all parameters; padded_elements: with padding; masked_elements: those that take no part in
          compression, 0 in warmup.

        **Whether it goes well**

        - error_ratio: norm of this rank's pending error over that of the momentum it sent; 0 in warmup. With "rms"
          scales errors may grow where it stays above 1; above 1.2 there is a warning, once.
        - grad_scale: factor that max_grad_norm put on the gradients of the last step, 1 if none.
        - clipped: for each bound the number of layers that it clipped in the last step: max_coeff and min_coeff the
          trust ratio in warmup, factor_max, factor_min, threshold_high and threshold_low (the last factor times 1 +
          and 1 - factor_threshold) the factor in compression, max_rate_ratio what both give. A layer counts for the
          bound that decided.

        **Per layer**: lists in the order of layers, the names of the parameters that are not empty

        - trust_ratio: c, or C f in compression; factor: f; scaling: s_j.
        - unclipped: c, or f in compression, before its bounds; clipped_by: the bound that decided, as in clipped, or
          None.
        - layer_error_ratio: as error_ratio.
        - variance_stability: near 1 where the variance has settled: |v|_1 over what it was 1 / (1 - betas[1]) steps
          before, both over 1 - betas[1]^k. 1-bit Adam's rule (Tang et al., arXiv 2102.02888), whose authors freeze v
          from 0.96 on. In compression the same of v', which begins as v. None where metrics() was not called so long
          ago since the warmup began.
        - fresh_variance_ratio: |v'|_1 over |v|_1 in compression, None in warmup. On several ranks it rises far above
          1, since v' takes in the noise of the signs.
        """
        found = collect_metrics(self._replica, self._stage, self._last_stage, self._variances)
        self._warn_of_errors(found["error_ratio"])
        missing = self._warmup_base + self._warmup_steps - found["step"]
        return found | {"steps_to_switch": missing if self.stage == "warmup" else 0}


def _rebuild(
    kind: type[OneBitLamb], groups: list[dict[str, Any]], options: dict[str, Any], shared: SharedGroup,
    state: dict[str, Any],
) -> OneBitLamb:  # fmt: skip
    optimizer = kind(groups, process_group=shared.group, **options)
    optimizer.load_state_dict(state)
    return optimizer
