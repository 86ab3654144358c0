"""Device and precision of a run."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

import torch

from forge_core.errors import ConfigError, Problem

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def choose_device(name: str, local_rank: int | None = None) -> torch.device:
    """The device called `name`; "auto" takes the current accelerator, else the CPU.

    With several processes each takes the accelerator of its `local_rank`, which becomes the current one.

    Raises:
        ConfigError: no such device, or it is not there.
    """
    if name == "auto":
        found: torch.device | None = torch.accelerator.current_accelerator() if _accelerated() else None
        current = found or torch.device("cpu")
        name = str(current) if local_rank is None else current.type
    try:
        device = torch.device(name)
        if local_rank is not None and device.type != "cpu":
            device = device if ":" in name else torch.device(device.type, local_rank)
            torch.accelerator.set_device_index(device.index)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            [Problem("train.device", f"{name!r} cannot be used: {reason}", "auto, cpu, cuda")]
        ) from error
    return device


def _accelerated() -> bool:
    return torch.accelerator.is_available()


def choose_dtypes(name: str, device: torch.device) -> tuple[torch.dtype, torch.dtype]:
    """(compute, parameters). "auto": bf16 on an accelerator, fp32 on a CPU; weights stay fp32, fp64 under
    fp64."""
    if name == "auto":
        name = "fp32" if device.type == "cpu" else "bf16"
    compute = DTYPES[name]
    return compute, torch.float64 if compute is torch.float64 else torch.float32


M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


def keep_freed_memory() -> None:
    """Tell glibc to keep what is freed, for training on a CPU.

    A step frees and takes the same large tensors over and over. By default glibc gives them back to the
    system each time, and the page faults of taking them again cost several percent of a step. Does nothing
    with another C library, or where the environment says how malloc is to behave.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(M_MMAP_THRESHOLD, 32 << 20)  # the most it takes
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)
        mallopt(M_TOP_PAD, 64 << 20)
