"""A bad update leaves parameters and optimizer state bit-unchanged.

The protocol is torch's own for fused optimizers: `optimizer.found_inf`, a () fp32 tensor on the device of the
parameters, holds 1.0 for "skip". An optimizer whose `step()` obeys it on the device, without the host
waiting, says so with `forge_skips_on_device = True`; then parameters, moments and step counters must keep
their bits however broken the gradients are (0 * NaN is NaN, so a mask that multiplies is not enough). It may
also honour `optimizer.grad_scale`, a () tensor that gradients are to be divided by. For all others the host
waits for the verdict.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

HOST_SYNCS = {
    "forge_core.optim.skip:guarded_step": "an optimizer that cannot skip an update on the device "
    "(schedule-free, not fused, most third parties') waits for the verdict once an update",
}
"""Places of this package where the host waits for the device, and why."""
_RANGE: Any = torch.optim.Optimizer.profile_hook_step(lambda optimizer: None).__code__
"""Of what torch puts around every `step`."""


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step()` obeys `found_inf` on the device.

    So do ours, those that declare it, and torch's fused Adam and AdamW. Torch's fused SGD is left out: a
    skipped first step leaves its momentum buffer uninitialised.
    """
    if isinstance(optimizer, torch.optim.Adam):
        return all(group["fused"] for group in optimizer.param_groups)
    return bool(getattr(optimizer, "forge_skips_on_device", False))


def guarded_step(optimizer: torch.optim.Optimizer, ok: Tensor) -> None:
    """`optimizer.step()` where `ok` () bool is True; else parameters and state stay bit-unchanged.

    On an accelerator one host sync where `skips_on_device(optimizer)` is False (see `HOST_SYNCS`), else none.
    On a CPU the verdict lies in host memory already: looking at it costs less than a skip in the kernels.
    """
    if ok.device.type == "cpu":
        if ok.numpy():
            _step(optimizer)
    elif skips_on_device(optimizer):
        step_unless_flagged(optimizer, ok)
    elif bool(ok):
        _step(optimizer)


def step_unless_flagged(optimizer: torch.optim.Optimizer, ok: Tensor) -> None:
    """`optimizer.step()` with the verdict as `found_inf`: the kernels skip, the host knows nothing."""
    flagged = cast(Any, optimizer)
    flagged.found_inf = (~ok).to(torch.float32)
    try:
        _step(optimizer)
    finally:
        del flagged.found_inf


def _step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()`, past the range that torch opens around it for a profiler, where nobody looks and no
    hook listens: it takes about as long as the update of a small model."""
    step: Any = type(optimizer).step
    # what others have put around it is not passed by, though it may bear the same marks
    in_range = getattr(step, "__code__", None) is _RANGE and "step" not in vars(optimizer)
    if in_range and not _listens(optimizer):
        step.__wrapped__(optimizer)
    else:
        optimizer.step()


def _listens(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a profiler runs or hooks are registered."""
    own: Any = optimizer
    return bool(
        own._optimizer_step_pre_hooks
        or own._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or torch._C._autograd._profiler_enabled()
    )
