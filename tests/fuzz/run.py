"""What ranks do with plans: run the optimizer through them, and write down what it holds after every operation."""

from __future__ import annotations

import copy
import io
import traceback
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from onebit_triton import OneBitLamb
from onebit_triton.checkpoint import KEY, SCALARS
from onebit_triton.kernels.tables import flat

from .plans import Add, Consolidate, Group, Move, Plan, Resume, Rewarm, Step, make_gradients, make_mask, make_parameter

DENSE = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh", "worker_error", "server_error")

Seen = dict[str, Any]


def run_plans(rank: int, world: int, plans: list[Plan]) -> list[list[Seen | None] | str]:
    """Of every plan what this rank saw, None where it takes no part; or the traceback of what went wrong."""
    groups = [dist.new_group(list(range(ranks))) for ranks in range(1, world + 1)]
    dist.barrier()  # a rank without work would close its connections while others still open theirs

    def run(plan: Plan) -> list[Seen | None] | str:
        try:
            return Run(rank, groups, plan).through()
        except Exception:
            return traceback.format_exc()

    return [run(plan) for plan in plans]


def look(optimizer: OneBitLamb) -> Seen:
    """Everything that a state dict has, as vectors over all elements in memory order, and the parameters."""
    state = optimizer.state_dict()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    entries = [(p, state["state"][number]) for number, p in enumerate(params) if p.numel()]
    seen: Seen = {"progress": state["param_groups"][0][KEY], "rounded": True}
    for key in DENSE:
        own = [entry.get(key, entry.get("pending_error") if key == "worker_error" else None) for _, entry in entries]
        if all(value is not None for value in own):
            seen[key] = np.concatenate([flat(value).numpy() for value in own]) if own else np.zeros(0)
    for key in SCALARS:
        seen[key] = np.array([entry[key].item() for _, entry in entries])
    seen["server_sizes"] = [entry["server_error"].numel() if "server_error" in entry else 0 for _, entry in entries]
    values = []
    for p, entry in entries:
        master = entry.get("master", p.detach())
        values.append(flat(master.float()).numpy().copy())
        seen["rounded"] &= torch.equal(master.to(p.dtype), p.detach())
    seen["p"] = np.concatenate(values) if values else np.zeros(0)
    return seen


class Run:
    """One plan on one rank."""

    def __init__(self, rank: int, groups: list[Any], plan: Plan) -> None:
        self.rank, self.groups, self.plan, self.ranks = rank, groups, plan, plan.ranks
        self.shapes: list[Group] = list(plan.groups)
        self.params = self._make_parameters()
        self.layout = {key: plan.options[key] for key in ("block_elements", "bucket_elements")}
        self.optimizer = self._build() if self.member else None

    @property
    def member(self) -> bool:
        return self.rank < self.ranks

    @property
    def tensors(self) -> list[Any]:
        return [tensor for group in self.shapes for tensor in group.tensors]

    def _make_parameters(self) -> list[torch.nn.Parameter]:
        return [make_parameter(self.plan, number, tensor) for number, tensor in enumerate(self.tensors)]

    def _group(self, group: Group, first: int) -> dict[str, Any]:
        params = self.params[first : first + len(group.tensors)]
        return {"params": params, "exp_avg_mask": make_mask(self.plan, first, group), **group.options}

    def _build(self) -> OneBitLamb:
        groups, first = [], 0
        for group in self.shapes:
            groups.append(self._group(group, first))
            first += len(group.tensors)
        options = self.plan.options | self.layout
        return OneBitLamb(groups, process_group=self.groups[self.ranks - 1], **options)

    def through(self) -> list[Seen | None]:
        """Do everything, and look after each operation."""
        found = [self._look()]
        for at, operation in enumerate(self.plan.operations):
            match operation:
                case Step():
                    self._step(at, operation)
                case Resume(copied=True):
                    self._copy()
                case Resume():
                    self._load(self._save())
                case Move():
                    self._move(operation)
                case Consolidate():
                    if self.optimizer is not None:
                        self.optimizer.consolidate_errors()
                case Rewarm():
                    self._rewarm(operation)
                case Add():
                    self._add(operation)
            found.append(self._look())
        return found

    def _look(self) -> Seen | None:
        return look(self.optimizer) | {"stage": self.optimizer.stage} if self.optimizer is not None else None

    def _step(self, at: int, step: Step) -> None:
        if self.optimizer is None:
            return
        if step.lr is not None:
            self.optimizer.param_groups[0]["lr"] = step.lr
        scale = self.plan.loss_scale or 1.0
        found = make_gradients(self.plan, at, self.rank, self.ranks, self.tensors, step)
        for p, gradient in zip(self.params, found, strict=True):
            p.grad = None
            if gradient is not None:
                # In the parameter's order or, which is as good, in another.
                p.grad = torch.empty_like(p)
                flat(p.grad).copy_(torch.from_numpy(gradient * scale))
                if at % 2:
                    p.grad = p.grad.contiguous()
        if self.plan.loss_scale:
            self.optimizer.grad_scale = torch.tensor([scale])
        self.optimizer.step()

    def _save(self) -> bytes:
        if self.optimizer is None:
            return b""
        buffer = io.BytesIO()
        torch.save({"optimizer": self.optimizer.state_dict(), "params": [p.detach() for p in self.params]}, buffer)
        return buffer.getvalue()

    def _load(self, saved: bytes) -> None:
        """Into new parameters and a new optimizer."""
        if not self.member:
            self.optimizer = None
            return
        state = torch.load(io.BytesIO(saved), weights_only=True)
        self.params = self._make_parameters()
        with torch.no_grad():
            for p, value in zip(self.params, state["params"], strict=True):
                p.copy_(value)
        self.optimizer = self._build()
        self.optimizer.load_state_dict(state["optimizer"])

    def _copy(self) -> None:
        if self.optimizer is not None:
            self.optimizer = copy.deepcopy(self.optimizer)
            self.params = [p for group in self.optimizer.param_groups for p in group["params"]]

    def _move(self, move: Move) -> None:
        if self.optimizer is not None:
            self.optimizer.consolidate_errors()
        saved = [self._save()]
        if move.ranks > self.ranks:
            dist.broadcast_object_list(saved, 0)
        self.ranks = move.ranks
        self.layout = {"block_elements": move.block, "bucket_elements": max(move.block, move.bucket)}
        self._load(saved[0])

    def _rewarm(self, rewarm: Rewarm) -> None:
        if self.optimizer is None:
            return
        try:
            self.optimizer.rewarm(rewarm.steps)
        except RuntimeError as error:
            assert "still warming up" in str(error)  # noqa: PT017

    def _add(self, add: Add) -> None:
        allowed = [self.optimizer is not None and self.optimizer.stage == "warmup"]
        dist.broadcast_object_list(allowed, 0)  # those who take no part must know how many tensors there are
        before = list(self.shapes), list(self.params)
        first = len(self.params)
        self.shapes.append(add.group)
        self.params += self._make_parameters()[first:]
        if self.optimizer is not None:
            try:
                self.optimizer.add_param_group(self._group(add.group, first))
            except RuntimeError as error:
                assert "refused in the compression stage" in str(error)  # noqa: PT017
                assert not allowed[0]
        if not allowed[0]:
            self.shapes, self.params = before
