"""Data parallel by FSDP2: weights sharded or replicated, gradients summed over ranks, not averaged."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs
import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@attrs.frozen(kw_only=True)
class ShardPolicy:
    """How weights are sharded.

    Attributes:
        reshard_after_forward: let go of a block's whole weights after its forward, and gather them again for
            the backward (less memory, one more gather). The root never does: its backward follows at once.
        cpu_offload: keep shards, gradients and optimizer state in host memory.
        compute: dtype in which blocks gather their weights; None: as they are kept.
        reduce: dtype in which gradients are summed.
    """

    reshard_after_forward: bool = True
    cpu_offload: bool = False
    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None

    def precision(self, compute: torch.dtype | None) -> MixedPrecisionPolicy:
        """torch's policy; inputs keep the dtype that autocast gives them."""
        return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=self.reduce, cast_forward_inputs=False)

    def offload(self, device_type: str) -> OffloadPolicy:
        """torch's policy; a CPU has nothing to pin memory for."""
        return CPUOffloadPolicy(pin_memory=device_type != "cpu") if self.cpu_offload else OffloadPolicy()


def shard(model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, policy: ShardPolicy) -> nn.Module:
    """`fully_shard` every block, then the rest of the model; what is sharded already stays as it is.

    Args:
        model: on the meta device or in memory; DTensors of a tensor mesh with the same root stay so.
        blocks: units that are gathered one at a time.
        mesh: 1-D, or (replicas, shards).
    """
    device = mesh.device_type
    for block in blocks:
        if block is not model and not isinstance(block, FSDPModule):
            fully_shard(
                block,
                mesh=mesh,
                reshard_after_forward=policy.reshard_after_forward,
                mp_policy=policy.precision(policy.compute),
                offload_policy=policy.offload(device),
            )
    if policy.compute is not None:
        # whoever calls the model, within autocast or not, meets blocks whose weights are gathered like that
        model.forward = torch.autocast(device, policy.compute)(model.forward)
    # embedding, last norm and head keep their precision: so does the residual stream, as in one process
    fully_shard(
        model,
        mesh=mesh,
        reshard_after_forward=False,
        mp_policy=policy.precision(None),
        offload_policy=policy.offload(device),
    )
    sum_gradients(model)
    return model


def sum_gradients(model: nn.Module) -> None:
    """Sum gradients over data ranks instead of averaging: losses are divided by global counts already."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
