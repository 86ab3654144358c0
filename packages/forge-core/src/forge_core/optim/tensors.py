"""Optimizer updates on tensors that may be sharded, and that a flag on the device can turn into no update at
all.

Elementwise updates run on the part of a parameter that this rank holds. That is cheaper than dispatching
through DTensor, and lets parameters on different meshes share one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.sgd import sgd

_PLAIN = (Tensor, torch.nn.Parameter)


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor. Asked by attribute, since importing DTensor is slow; a plain tensor is known
    by its type, since looking for what is not there is slow, too."""
    return type(tensor) not in _PLAIN and hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """The part that this rank holds, sharing memory. Call under no_grad."""
    return cast(Any, tensor).to_local() if is_sharded(tensor) else tensor


def whole(part: Tensor, like: Tensor) -> Tensor:
    """The full tensor of which this rank has `part`, laid out as `like`; a collective if that is sharded."""
    if not is_sharded(like):
        return part
    from torch.distributed.tensor import DTensor

    sharded = cast(DTensor, like)
    gathered = DTensor.from_local(
        part, sharded.device_mesh, sharded.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return gathered.full_tensor()


def part(full: Tensor, like: Tensor) -> Tensor:
    """This rank's part of `full`, equal on all ranks, laid out as `like`; needs no communication."""
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import DTensor, Replicate

    sharded = cast(DTensor, like)
    everywhere = [Replicate()] * sharded.device_mesh.ndim
    replica = DTensor.from_local(full, sharded.device_mesh, everywhere, run_check=False)
    return replica.redistribute(placements=sharded.placements).to_local()


def gradients(params: Sequence[Tensor], grad_scale: Tensor | None = None) -> list[Tensor]:
    """This rank's part of each gradient, divided by `grad_scale` () if there is one. All must have a
    gradient.

    Raises:
        RuntimeError: a gradient is sparse.
    """
    found: list[Tensor] = []
    for p in params:
        grad = p.grad
        assert grad is not None
        if grad.is_sparse:
            raise RuntimeError("sparse gradients are not supported")
        if is_sharded(p) and cast(Any, grad).placements != cast(Any, p).placements:
            grad = cast(Any, grad).redistribute(placements=cast(Any, p).placements)
        found.append(local(grad))
    if grad_scale is None or not found:
        return found
    return list(torch._foreach_div(found, grad_scale.to(found[0].device, non_blocking=True)))


def descend_(
    params: Sequence[Tensor],
    directions: Sequence[Tensor],
    *,
    lr: float,
    weight_decay: float = 0.0,
    found_inf: Tensor | None = None,
) -> None:
    """p <- p - lr (direction + weight_decay p), in place, for each pair.

    Where `found_inf` (() fp32 on a device) holds 1.0, every p keeps its bits, whatever the directions hold,
    and the host does not wait: torch's fused SGD kernel reads the flag itself and returns.
    """
    sgd(
        list(params),
        list(directions),
        [None] * len(params),
        fused=True,
        found_inf=found_inf,
        lr=lr,
        weight_decay=weight_decay,
        momentum=0.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )


def average_(
    averages: Sequence[Tensor], values: Sequence[Tensor], *, weight: float, found_inf: Tensor | None = None
) -> None:
    """m <- m + weight (value - m), in place, for each pair; skipped by `found_inf` like `descend_`."""
    if averages:
        descend_(averages, torch._foreach_sub(list(averages), list(values)), lr=weight, found_inf=found_inf)
