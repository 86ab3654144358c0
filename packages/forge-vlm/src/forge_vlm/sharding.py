"""The encoder over data ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from forge_core import TrainingSession


def shard_encoder(session: TrainingSession, model: nn.Module) -> nn.Module:
    """FSDP2 for the encoder and each of its `blocks` and `global_blocks`: frozen weights share no unit with
    those that train.

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
    for unit in [*getattr(encoder, "blocks", ()), *getattr(encoder, "global_blocks", ()), encoder]:
        fully_shard(
            unit,
            mesh=mesh,
            reshard_after_forward=True,
            mp_policy=policy.precision(policy.compute if unit is not encoder else None),
            offload_policy=policy.offload(mesh.device_type),
        )
    sum_gradients(encoder)
    return model
