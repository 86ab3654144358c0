"""Experts over ranks: who has which, and over whom weights are sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from forge_core.config.tables import DistributedConfig
from forge_moe.ffn import moe_layers
from forge_moe.ranks import ExpertRanks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from forge_core import TrainingSession


def divide_experts(session: TrainingSession, model: nn.Module) -> nn.Module:
    """Tell every layer of its ranks; where `moe.ep` divides experts, give each rank its own (on meta)."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = session.mesh
    ep = mesh.sub("ep") if mesh.size("ep") > 1 else None
    data = mesh.data_parallel()
    ranks = ExpertRanks(
        experts=None if ep is None else ep.get_group(),
        context=mesh.group("cp"),
        data=[] if data is None else [data.get_group(i) for i in range(data.ndim) if data.size(i) > 1],
    )
    for _, layer in moe_layers(model):
        layer.ranks = ranks
        experts = layer.experts
        for name, parameter in list(experts.named_parameters(recurse=False)) if ep is not None else ():
            part = distribute_tensor(parameter.data, ep, [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        if experts.scale is not None:
            experts.scale = ranks.own(experts.scale).clone()
    return model


def shard_apart(session: TrainingSession, model: nn.Module) -> nn.Module:
    """FSDP2 for what must not be sharded with its block: divided experts, and routers that stay exact.

    Experts that ranks divide have replicas only on the ranks that `moe.ep` leaves, and are sharded over those
    along a dimension inside each expert. Routers keep their precision where blocks gather in a lower one.
    """
    from torch.distributed.fsdp import fully_shard

    from forge_core.loop.transforms import shard_policy

    mesh = session.mesh
    data = mesh.data_parallel()
    if data is None:
        return model
    policy = shard_policy(session)
    options: dict[str, Any] = {
        "reshard_after_forward": session.config[DistributedConfig].reshard_after_forward,
        "offload_policy": policy.offload(data.device_type),
    }
    rest = replicas(session) if mesh.size("ep") > 1 else None
    for _, layer in moe_layers(model):
        if policy.compute is not None:
            fully_shard(layer.router, mesh=data, mp_policy=policy.precision(None), **options)
        if rest is not None:
            fully_shard(
                layer.experts,
                mesh=rest,
                mp_policy=policy.precision(policy.compute),
                shard_placement_fn=_inside(rest.size(rest.ndim - 1)),
                **options,
            )
    return model


def replicas(session: TrainingSession) -> DeviceMesh:
    """The ranks that have the same experts: (shards) or (replicas, shards); context ranks are shards."""
    from torch.distributed.device_mesh import DeviceMesh

    from forge_core.distributed.mesh import remembered

    mesh = session.mesh
    shards = mesh.sub("dp_shard_rest")
    if mesh.size("cp") > 1:
        both = mesh.sub("dp_shard_rest", "cp")
        key = ("expert_shards", tuple(both.mesh.flatten().tolist()))
        shards = remembered(key, lambda: both._flatten("expert_shards"))
    if mesh.size("dp_replicate") == 1:
        return shards
    return DeviceMesh._concatenate([mesh.sub("dp_replicate"), shards])


def _inside(size: int) -> Any:
    """Which side of (E, rows, columns) is sharded: one that `size` divides, as it does the hidden width; of a
    bias (E, rows) otherwise the experts."""
    from torch.distributed.tensor import Shard

    def place(parameter: nn.Parameter) -> Shard:
        return Shard(1 if parameter.shape[1] % size == 0 else 2 if parameter.ndim == 3 else 0)

    return place
