"""State as trees: dicts, lists, numbers, strings and tensors, split into JSON and named tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

TENSOR, TUPLE, FLOAT, ARRAY, BYTES = "$tensor", "$tuple", "$float", "$array", "$bytes"
MARKS = (TENSOR, TUPLE, FLOAT, ARRAY, BYTES)


def split(tree: Any, prefix: str) -> tuple[Any, dict[str, Tensor]]:
    """A tree as JSON in which each tensor is replaced by its name, and the tensors by name.

    Tensors and NumPy arrays may be anywhere. Numbers that are not finite, tuples and bytes are marked, for
    JSON has none.

    Raises:
        TypeError: something else, named by its place.
    """
    tensors: dict[str, Tensor] = {}
    return _split(tree, prefix, tensors), tensors


def _split(value: Any, at: str, tensors: dict[str, Tensor]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {FLOAT: repr(value)}
    if isinstance(value, Tensor):
        tensors[at] = value
        return {TENSOR: at}
    if isinstance(value, np.ndarray):
        tensors[at] = torch.from_numpy(np.ascontiguousarray(value))
        return {ARRAY: at}
    if isinstance(value, np.generic):
        return _split(value.item(), at, tensors)
    if isinstance(value, bytes):
        return {BYTES: value.hex()}
    if isinstance(value, tuple):
        return {TUPLE: [_split(item, f"{at}/{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, list):
        return [_split(item, f"{at}/{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or key in MARKS:
                raise TypeError(f"{at}: key {key!r} cannot be saved; keys are text")
        return {key: _split(item, f"{at}/{key}", tensors) for key, item in value.items()}
    raise TypeError(
        f"{at}: a {type(value).__name__} cannot be saved; numbers, text, lists, dicts, tensors can"
    )


def join(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `split`.

    Raises:
        KeyError: a tensor is missing.
    """
    if isinstance(value, list):
        return [join(item, tensors) for item in value]
    if not isinstance(value, Mapping):
        return value
    if len(value) == 1:
        ((mark, inner),) = value.items()
        if mark == TENSOR:
            return tensors[inner]
        if mark == ARRAY:
            return tensors[inner].numpy()
        if mark == TUPLE:
            return tuple(join(item, tensors) for item in inner)
        if mark == FLOAT:
            return float(inner)
        if mark == BYTES:
            return bytes.fromhex(inner)
    return {key: join(item, tensors) for key, item in value.items()}
