"""FLOPs of a run's model: what all plugins say of it, as it trains now."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from forge_core.contract import Flops
from forge_core.model.decoder import Decoder

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession


def flops_of(session: TrainingSession) -> Flops | None:
    """FLOPs, forward and backward, over all plugins; None if nobody counts.

    A frozen matrix of the decoder counts four a weight in place of six: its own gradient is not computed.
    """
    freeze = getattr(session, "freeze", None)  # None: the model is still being built
    given = {"config": session.config, "trains": (lambda spec: True) if freeze is None else freeze.trains}
    answers = [i(given) for i in session.plugins.implementations("forge_flops")]
    found = [a if isinstance(a, Flops) else Flops(token=float(a)) for a in answers if a is not None]
    if not found:
        return None
    counted: dict[str, float] = {}
    most: dict[str, float] = {}
    for each in found:
        for name, value in each.counted.items():
            counted[name] = counted.get(name, 0.0) + value
        most |= each.most
    token = sum(each.token for each in found) - 2.0 * _frozen_weights(session)
    return Flops(token=token, counted=counted, most=most)


def _frozen_weights(session: TrainingSession) -> int:
    """Weights of the decoder's matrices, the head's included, that do not train now."""
    freeze = getattr(session, "freeze", None)
    if freeze is None:
        return 0
    decoders = [module for module in session.model.modules() if isinstance(module, Decoder)]
    matrices: list[torch.Tensor] = [
        p for decoder in decoders for p in decoder.layers.parameters() if p.ndim == 2
    ]
    matrices += [decoder.head.weight for decoder in decoders if decoder.head is not None]
    frozen = {id(freeze.named[name]) for name in freeze.frozen[max(freeze.stage, 0)]}
    return sum(p.numel() for p in matrices if id(p) in frozen)
