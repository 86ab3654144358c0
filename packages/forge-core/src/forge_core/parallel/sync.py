"""Whether a backward reduces gradients over ranks, or leaves that to a later one."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def set_gradient_sync(model: nn.Module, on: bool) -> None:
    """Let the next backwards reduce gradients over data ranks, or only add them up on each rank.

    Called on every rank alike: off before the first micro-batch of a step, on before the last, so that the
    gradients of a step are reduced once. Parts that are not sharded by FSDP2 are not concerned.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(on, recurse=False)
