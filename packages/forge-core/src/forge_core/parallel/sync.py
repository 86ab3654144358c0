"""When sharded models talk: gradients once a step, and no whole weights left over."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def set_gradient_sync(model: nn.Module, on: bool) -> None:
    """Whether backwards from now on reduce gradients over data ranks; off for all but the step's last.

    Until then they add up on each rank, in the precision of the weights' gradient. Models that are not
    sharded take no notice.
    """
    for module in roots(model):
        module.set_requires_gradient_sync(on)
        module.set_is_last_backward(on)


def reshard(model: nn.Module) -> None:
    """Let go of whole weights that a forward without a backward left in memory.

    Called after an evaluation or a generation: the next forward would take them for the weights of now, also
    where an update or an optimizer that swaps in averages has changed them since.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def gather_once(model: nn.Module) -> None:
    """Gather the weights of each unit one time, and let go of them.

    Where gradients are reduced in another dtype, a backward that does not reduce them asks every unit for the
    weights of its last gather, and FSDP2 fails at one that has not run until then, such as a part for inputs
    that this run has none of (`FSDPParam.to_accumulated_grad_if_needed` of torch 2.13).
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()
            module.reshard()


def roots(model: nn.Module) -> list[FSDPModule]:
    """The outermost sharded modules."""
    if isinstance(model, FSDPModule):
        return [model]
    return [root for child in model.children() for root in roots(child)]
