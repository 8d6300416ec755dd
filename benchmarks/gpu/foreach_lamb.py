"""LAMB as one writes it in eager torch: the rival that needs no kernel of its own."""

from __future__ import annotations

from typing import Any

import torch


class ForeachLamb:
    """LAMB by torch's foreach functions, without a host synchronisation; state in the parameters' dtype."""

    def __init__(
        self,
        params: list[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        self.params, self.lr, self.betas, self.eps, self.weight_decay = params, lr, betas, eps, weight_decay
        self.min_coeff, self.max_coeff = min_coeff, max_coeff
        self.exp_avgs = [torch.zeros_like(param) for param in params]
        self.exp_avg_sqs = [torch.zeros_like(param) for param in params]

    @torch.no_grad()
    def step(self) -> None:
        """Take one step."""
        (beta1, beta2), grads = self.betas, [param.grad for param in self.params]
        torch._foreach_lerp_(self.exp_avgs, grads, 1 - beta1)
        torch._foreach_mul_(self.exp_avg_sqs, beta2)
        torch._foreach_addcmul_(self.exp_avg_sqs, grads, grads, 1 - beta2)
        updates = torch._foreach_sqrt(self.exp_avg_sqs)
        torch._foreach_add_(updates, self.eps)
        torch._foreach_reciprocal_(updates)
        torch._foreach_mul_(updates, self.exp_avgs)
        torch._foreach_add_(updates, self.params, alpha=self.weight_decay)
        p_norms, u_norms = (torch.stack(torch._foreach_norm(tensors)) for tensors in (self.params, updates))
        ratios = (p_norms / u_norms).clamp(self.min_coeff, self.max_coeff)
        ratios = torch.where((p_norms > 0) & (u_norms > 0), ratios, 1.0)
        # One factor a tensor has no fused form: a launch for each.
        torch._foreach_mul_(updates, (-self.lr * ratios).unbind())
        torch._foreach_add_(self.params, updates)
