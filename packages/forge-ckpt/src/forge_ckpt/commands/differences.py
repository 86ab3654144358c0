"""What differs between two checkpoints, in words."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from forge_ckpt.changes import changes, describe
from forge_ckpt.reading import SavedCheckpoint
from forge_core.data.wording import counted

SHOWN = 20


def differences(one: SavedCheckpoint, other: SavedCheckpoint) -> Iterator[str]:
    """Configuration, then tensors: missing, of another shape or type, and how far values lie apart."""
    for change in changes(one.config_text, other.config_text):
        yield f"configuration: {describe(change)}"
    names = [*one.index.tensors, *(n for n in other.index.tensors if n not in one.index.tensors)]
    different = 0
    for name in names:
        if name not in other.index.tensors:
            yield f"{name}: only in {one.where}"
        elif name not in one.index.tensors:
            yield f"{name}: only in {other.where}"
        else:
            words = _difference(one.tensor(name), other.tensor(name))
            different += bool(words)
            if words and different <= SHOWN:
                yield f"{name}: {words}"
    if different > SHOWN:
        yield f"and {counted(different - SHOWN, 'more tensor')}"


def _difference(one: Tensor, other: Tensor) -> str:
    if one.shape != other.shape:
        return f"{tuple(one.shape)} and {tuple(other.shape)}"
    if one.dtype != other.dtype:
        return f"{one.dtype} and {other.dtype}"
    if torch.equal(one, other):
        return ""
    differ = (one != other) & ~((one != one) & (other != other))  # NaN in both is no difference
    count = int(differ.sum())
    if not count:
        return ""
    wide = torch.complex128 if one.is_complex() else torch.float64
    largest = (one[differ].to(wide) - other[differ].to(wide)).abs().max()
    return f"{count} of {counted(one.numel(), 'value')} differ, by {float(largest):.3g} at most"
