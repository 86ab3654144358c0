"""Muon: orthogonalised momentum for hidden matrices, fused AdamW for everything else, in one optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from forge_core.config.tables import OptimizerConfig
from forge_core.optim.adamw import fresh_state, fused_update_
from forge_core.optim.groups import MATRICES, MATRIX
from forge_core.optim.options import MuonOptions
from forge_core.optim.tensors import average_, descend_, gradients, local, part, whole

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""(a, b, c) of the quintic iteration: steepest at 0, singular values end near 1 (Jordan et al., 2024)."""
EPS = 1e-7


def orthogonalise(matrices: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Nearly the closest orthogonal matrix U V^T of each U S V^T, by Newton-Schulz iteration.

    X <- a X + (b A + c A A) X with A = X X^T, starting from X / |X|_F. Jordan et al., "Muon" (2024).

    Args:
        matrices: (m, n) or (k, m, n).
        steps: iterations; 5 bring singular values to about 0.7 to 1.2.
        dtype: of the iterations.

    Returns:
        The same shape, in `dtype`.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.to(dtype)
    x = x.mT if tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=EPS)
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        polynomial = multiply_add(gram, gram, gram, beta=b, alpha=c)
        x = multiply_add(x, polynomial, x, beta=a)
    return x.mT if tall else x


def update_scale(rule: str, rows: int, columns: int) -> float:
    """Factor on the orthogonal update of a whole (rows, columns) matrix.

    "original": sqrt(max(1, rows / columns)), Jordan et al. (2024). "match_rms_adamw":
    0.2 sqrt(max(rows, columns)), the size of AdamW's updates, Liu et al., "Muon is Scalable" (2025), eq. 4.
    """
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


class Muon(torch.optim.Optimizer):
    """One optimizer for all: groups of kind "matrix" or "matrices" are orthogonalised, others take AdamW.

        m <- mu m + (1 - mu) g;  d = (1 - mu) g + mu m (nesterov) or m;  p <- p (1 - lr wd) - lr scale NS(d)

    A "matrix" of more than two dimensions counts as (first, all others); of "matrices" (..., m, n) each last
    pair of dimensions is a matrix. A sharded matrix is gathered for the iteration, so that the update does
    not depend on how parameters are laid out. State: `momentum_buffer`, or that of AdamW.

    Args:
        groups: groups of `parameter_groups`.
        lr, weight_decay: of all groups that bring none.
        betas, eps: of AdamW.
        momentum, nesterov, ns_steps, ns_dtype, scale: of matrices, see `MuonOptions`.
    """

    forge_skips_on_device = True

    def __init__(
        self,
        groups: Any,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_steps: int = 5,
        ns_dtype: str = "auto",
        scale: str = "original",
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "kind": "other",
            "betas": betas,
            "eps": eps,
            "fused": True,  # so that loading puts step counters on the device
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "ns_dtype": ns_dtype,
            "scale": scale,
        }
        super().__init__(groups, defaults)

    def init_state(self) -> None:
        """Create the state of every parameter that trains and has none."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad and not self.state[p]:
                    self.state[p] = self._fresh_state(p, group["kind"])

    @staticmethod
    def _fresh_state(p: Tensor, kind: str) -> dict[str, Tensor]:
        if kind not in (MATRIX, MATRICES):
            return fresh_state(p)
        return {"momentum_buffer": torch.zeros_like(p, memory_format=torch.preserve_format)}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update; with `found_inf` () = 1.0 none at all, decided on the device."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            if group["kind"] in (MATRIX, MATRICES):
                self._orthogonal_update(group, grad_scale, found_inf)
            else:
                fused_update_(self, group, grad_scale=grad_scale, found_inf=found_inf)
        return loss

    def _orthogonal_update(
        self, group: dict[str, Any], grad_scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        params = [p for p in group["params"] if p.grad is not None]
        for p in params:
            if not self.state[p]:
                self.state[p] = self._fresh_state(p, group["kind"])
        grads = gradients(params, grad_scale)
        averages = [local(self.state[p]["momentum_buffer"]) for p in params]
        momentum = group["momentum"]
        average_(averages, grads, weight=1.0 - momentum, found_inf=found_inf)
        for p, grad, average in zip(params, grads, averages, strict=True):
            ahead = torch.lerp(grad, average, momentum) if group["nesterov"] else average
            direction = self._direction(whole(ahead, p), group)
            descend_(
                [local(p)],
                [part(direction, p)],
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                found_inf=found_inf,
            )

    @staticmethod
    def _direction(ahead: Tensor, group: dict[str, Any]) -> Tensor:
        if group["kind"] == MATRIX:
            matrices = ahead.flatten(1)
        else:
            matrices = ahead.flatten(0, -3) if ahead.ndim > 2 else ahead
        rows, columns = matrices.shape[-2:]
        result = orthogonalise(matrices, group["ns_steps"], _iteration_dtype(group["ns_dtype"], ahead))
        scale = update_scale(group["scale"], rows, columns)
        return result.to(ahead.dtype).mul_(scale).reshape(ahead.shape).contiguous()


def _iteration_dtype(name: str, matrix: Tensor) -> torch.dtype:
    if name == "bf16":
        return torch.bfloat16
    if name == "auto" and matrix.dtype is torch.float64:
        return torch.float64
    return torch.bfloat16 if name == "auto" and matrix.device.type != "cpu" else torch.float32


def build(groups: list[dict[str, Any]], config: OptimizerConfig, options: MuonOptions) -> Muon:
    """Muon over all groups; those that take AdamW have `adam_lr`, times their scale, as base rate."""
    factor = 1.0 if options.adam_lr is None else options.adam_lr / config.lr
    scaled = []
    for group in groups:
        own = 1.0 if group["kind"] in (MATRIX, MATRICES) else factor
        scaled.append({**group, "lr": group["lr"] * own, "initial_lr": group["initial_lr"] * own})
    return Muon(
        scaled,
        lr=config.lr,
        weight_decay=config.weight_decay,
        betas=config.betas,
        eps=config.eps,
        momentum=options.momentum,
        nesterov=options.nesterov,
        ns_steps=options.ns_steps,
        ns_dtype=options.ns_dtype,
        scale=options.scale,
    )
