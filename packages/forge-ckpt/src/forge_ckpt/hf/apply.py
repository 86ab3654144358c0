"""Rules applied to tensors, both ways. Works on meta tensors, too, which tells shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from forge_core.contract import TensorRule
from forge_core.errors import ForgeError


def to_ours(rule: TensorRule, theirs: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of ours, in the order of `rule.ours`, from theirs, in the order of the unit's names.

    Raises:
        ForgeError: a shape that the rule does not fit.
    """
    if rule.kind == "stack":
        return [torch.stack(list(theirs))]
    [tensor] = theirs
    if rule.kind == "split":
        if tensor.ndim <= rule.dim or tensor.shape[rule.dim] != sum(rule.sizes):
            raise ForgeError(f"{rule.theirs[0]} is {shown(tensor)}, which does not split into {rule.sizes}")
        return list(torch.split(tensor, list(rule.sizes), rule.dim))
    if rule.kind == "permute":
        seen = _seen(tensor, rule.shape, rule.theirs[0]).permute(rule.order)
        return [seen.reshape(rule.ours_shape) if rule.ours_shape else seen]
    return [tensor]


def to_theirs(rule: TensorRule, ours: Sequence[Tensor]) -> list[Tensor]:
    """The other way round: tensors of theirs, in the order of the unit's names.

    Raises:
        ForgeError: a shape that the rule does not fit.
    """
    if rule.kind == "split":
        return [torch.cat(list(ours), rule.dim)]
    [tensor] = ours
    if rule.kind == "stack":
        if len(tensor) != rule.count:
            raise ForgeError(f"{rule.ours[0]} is {shown(tensor)}, not a stack of {rule.count}")
        return list(tensor.unbind(0))
    if rule.kind == "permute":
        shape = tuple(rule.shape[i] for i in rule.order) if rule.shape else ()
        back = sorted(range(len(rule.order)), key=lambda i: rule.order[i])
        seen = _seen(tensor, shape, rule.ours[0]).permute(back)
        return [seen.reshape(rule.theirs_shape) if rule.theirs_shape else seen]
    return [tensor]


def _seen(tensor: Tensor, shape: Sequence[int], name: str) -> Tensor:
    if not shape:
        return tensor
    if tensor.numel() != math.prod(shape):
        raise ForgeError(f"{name} is {shown(tensor)}, which cannot be seen as {tuple(shape)}")
    return tensor.reshape(tuple(shape))


def shown(tensor: Tensor) -> str:
    """The shape as people write it: 4 x 16."""
    return " x ".join(map(str, tensor.shape)) or "a number"
