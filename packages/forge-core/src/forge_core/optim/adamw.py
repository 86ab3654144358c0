"""AdamW: torch's own, with its fused kernel where there is one."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from forge_core.config.tables import OptimizerConfig
from forge_core.optim.groups import merged
from forge_core.optim.options import AdamWOptions
from forge_core.optim.tensors import gradients, is_sharded, local

FUSED_DEVICES = ("cpu", "cuda", "xpu", "hpu", "mtia")
"""Device types for which torch has the fused kernel with `found_inf`."""

log = logging.getLogger(__name__)


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` on the parts that this rank holds.

    Torch's own takes no mix of plain tensors and DTensors, nor of DTensors on different meshes, and sorts its
    tensors by device anew at every update. State and numbers are the same.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update; with `found_inf` () = 1.0 none at all, decided on the device (fused only)."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for group in self.param_groups:
            fused_update_(self, group, grad_scale=grad_scale, found_inf=found_inf, fused=bool(group["fused"]))
        return loss


def build(groups: list[dict[str, Any]], config: OptimizerConfig, options: AdamWOptions) -> torch.optim.AdamW:
    """`torch.optim.AdamW` (Loshchilov and Hutter, 2019, algorithm 2), moments in the parameters' dtype."""
    fused = options.fused and fused_available(p for group in groups for p in group["params"])
    if options.fused and not fused:
        log.warning(
            "optimizer.adamw.fused: no fused AdamW for these parameters; each update costs a host sync"
        )
    sharded = any(is_sharded(p) for group in groups for p in group["params"])
    kind = AdamW if fused or sharded else torch.optim.AdamW
    return kind(
        merged(groups),
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
        fused=fused or None,
    )


def fused_available(params: Iterable[Tensor]) -> bool:
    """Whether torch's fused AdamW takes all of these parameters."""
    return all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in params)


def fresh_state(parameter: Tensor, fused: bool = True) -> dict[str, Tensor]:
    """State of a parameter before its first update, as torch lays it out."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu"),
        "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
    }


def fused_update_(
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    *,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    fused: bool = True,
) -> None:
    """One AdamW update of the parameters of `group` that have a gradient, each by the part that is here."""
    params = [p for p in group["params"] if p.grad is not None]
    for p in params:
        if not optimizer.state[p]:
            optimizer.state[p] = fresh_state(p, fused)
    states = [optimizer.state[p] for p in params]
    beta1, beta2 = group["betas"]
    tensors: tuple[list[Tensor], ...] = (
        [local(p) for p in params],
        gradients(params, grad_scale),
        [local(state["exp_avg"]) for state in states],
        [local(state["exp_avg_sq"]) for state in states],
        [],
        [state["step"] for state in states],
    )
    settings = {"lr": group["lr"], "beta1": beta1, "beta2": beta2, "eps": group["eps"]}
    settings |= {"weight_decay": group["weight_decay"], "amsgrad": False, "maximize": False}
    if fused and _alike(tensors[0], found_inf):
        _kernel_(*tensors, found_inf=found_inf, **settings)
    else:
        cast(Any, adamw)(*tensors, fused=fused, foreach=not fused, found_inf=found_inf, **settings)


def _alike(params: list[Tensor], found_inf: Tensor | None) -> bool:
    """Whether one call of the kernel takes them all."""
    kinds = {(p.device, p.dtype) for p in params}
    return len(kinds) == 1 and (found_inf is None or found_inf.device == params[0].device)


def _kernel_(*tensors: list[Tensor], found_inf: Tensor | None, **settings: Any) -> None:
    """What torch's `adamw` does for tensors of one kind; its way there costs as much as a small update."""
    steps = tensors[-1]
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(*tensors, grad_scale=None, found_inf=found_inf, **settings)
    if found_inf is not None:
        torch._foreach_sub_(steps, [found_inf] * len(steps))
