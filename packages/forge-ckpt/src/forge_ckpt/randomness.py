"""The random state of a process: Python, NumPy, torch and the device."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every global generator, as a tree of numbers and tensors."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": {"version": version, "state": torch.tensor(internal, dtype=torch.int64), "gauss": gauss},
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys, dtype=np.uint32).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached": float(cached),
        },
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put every generator into a saved state."""
    python = state["python"]
    random.setstate((python["version"], tuple(python["state"].tolist()), python["gauss"]))
    numbers = state["numpy"]
    np.random.set_state(
        (
            numbers["name"],
            numbers["keys"].numpy().astype(np.uint32),
            numbers["position"],
            numbers["has_gauss"],
            numbers["cached"],
        )
    )
    torch.set_rng_state(state["torch"].clone())
    if device.type == "cuda" and "device" in state:
        torch.cuda.set_rng_state(state["device"].clone(), device)
