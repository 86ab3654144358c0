"""The encoder over data ranks, and what of it is computed again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from forge_core import TrainingSession


def blocks_of_encoder(encoder: nn.Module) -> list[nn.Module]:
    """What is sharded and recomputed as one: its `blocks` and `global_blocks`, if it has any."""
    return [*getattr(encoder, "blocks", ()), *getattr(encoder, "global_blocks", ())]


def shard_encoder(session: TrainingSession, model: nn.Module) -> nn.Module:
    """FSDP2 for the encoder and each of its blocks: frozen weights share no unit with those that train.

    Every rank runs it in every forward, with or without images, so that all gather its weights alike.
    """
    from torch.distributed.fsdp import fully_shard

    from forge_core.loop.transforms import shard_policy
    from forge_core.parallel.data import sum_gradients
    from forge_vlm.model import encoder_of

    mesh, encoder = session.mesh.data_parallel(), encoder_of(model)
    if mesh is None or encoder is None or not any(True for _ in encoder.parameters()):
        return model
    policy = shard_policy(session)
    # norms of torch, which encoders of others have, take no bf16 weights for fp32 states on a CPU
    compute = None if mesh.device_type == "cpu" else policy.compute
    for unit in [*blocks_of_encoder(encoder), encoder]:
        fully_shard(
            unit,
            mesh=mesh,
            # also where the decoder keeps its weights: without a backward a frozen one would never let go
            reshard_after_forward=True,
            mp_policy=policy.precision(compute if unit is not encoder else None),
            offload_policy=policy.offload(mesh.device_type),
        )
    sum_gradients(encoder)
    return model


def recompute_encoder(session: TrainingSession, model: nn.Module) -> nn.Module:
    """Activation checkpointing of the encoder's blocks, as `[train]` says it of the decoder's; one that is
    frozen keeps nothing anyway."""
    from forge_core.loop.transforms import recompute_policy
    from forge_core.parallel.recompute import recompute_blocks
    from forge_vlm.model import encoder_of

    encoder = encoder_of(model)
    if encoder is not None:
        recompute_blocks(blocks_of_encoder(encoder), recompute_policy(session))
    return model
