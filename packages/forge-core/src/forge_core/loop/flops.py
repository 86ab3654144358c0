"""FLOPs of a run's model: what all plugins say of it, as it trains now."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from torch import nn

from forge_core.contract import Flops
from forge_core.model.decoder import Decoder
from forge_core.model.roles import role_of

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession

SMALL = ("norm", "bias")
"""Roles of parameters that multiply no matrix."""


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


def _frozen_weights(session: TrainingSession) -> float:
    """Weights of the decoder's matrices, the head's included, that a token uses and that do not train now."""
    freeze = getattr(session, "freeze", None)
    if freeze is None:
        return 0.0
    frozen = {id(freeze.named[name]) for name in freeze.frozen[max(freeze.stage, 0)]}
    total = 0.0
    for decoder in (module for module in session.model.modules() if isinstance(module, Decoder)):
        total += _frozen_in(decoder.layers, frozen, 1.0)
        if decoder.head is not None and id(decoder.head.weight) in frozen:
            total += decoder.head.weight.numel()
    return total


def _frozen_in(module: nn.Module, frozen: Collection[int], share: float) -> float:
    """Those of a module, of which a token may use a share (`active_share`)."""
    share *= float(getattr(module, "active_share", 1.0))
    own = module.named_parameters(recurse=False)
    total = sum(p.numel() for name, p in own if id(p) in frozen and role_of(module, name) not in SMALL)
    return share * total + sum(_frozen_in(child, frozen, share) for child in module.children())
