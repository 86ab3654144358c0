"""FLOPs of a run's model: what all plugins say of it, as it trains now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from forge_core.contract import Flops
from forge_core.loop.naming import named_parameters
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
    """Weights of the decoder's matrices that a token uses and that do not train now, on whatever rank."""
    freeze = getattr(session, "freeze", None)
    return 0.0 if freeze is None else sum(session.matrices.get(name, 0.0) for name in freeze.frozen_now())


def matrix_weights(model: nn.Module) -> dict[str, float]:
    """By global name, the weights of the decoder's matrices, the head's included, that a token uses.

    Args:
        model: whole: neither cut nor divided over ranks, so that all of them count the same.
    """
    names = {id(parameter): name for name, parameter in named_parameters(model).items()}
    found: dict[str, float] = {}
    for decoder in (module for module in model.modules() if isinstance(module, Decoder)):
        _add_weights(decoder.layers, 1.0, names, found)
        if decoder.head is not None:
            name = names[id(decoder.head.weight)]
            found[name] = found.get(name, 0.0) + decoder.head.weight.numel()
    return found


def _add_weights(module: nn.Module, share: float, names: Mapping[int, str], found: dict[str, float]) -> None:
    """Those of a module, of which a token may use a share (`active_share`)."""
    share *= float(getattr(module, "active_share", 1.0))
    for own, parameter in module.named_parameters(recurse=False):
        if role_of(module, own) not in SMALL:
            name = names[id(parameter)]
            found[name] = found.get(name, 0.0) + share * parameter.numel()
    for child in module.children():
        _add_weights(child, share, names, found)
