"""Device and precision of a run."""

from __future__ import annotations

import torch

from forge_core.errors import ConfigError, Problem

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def choose_device(name: str) -> torch.device:
    """The device called `name`; "auto" takes the current accelerator, else the CPU.

    Raises:
        ConfigError: no such device, or it is not there.
    """
    if name == "auto":
        return (
            torch.accelerator.current_accelerator() or torch.device("cpu")
            if _accelerated()
            else torch.device("cpu")
        )
    try:
        device = torch.device(name)
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
