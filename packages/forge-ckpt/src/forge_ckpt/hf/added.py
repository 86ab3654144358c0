"""Parameters that transforms of plugins added to a model or moved in it, as a folder's names have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from forge_core.loop.naming import named_parameters

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession


def added_in(
    session: TrainingSession, model: nn.Module, tensors: Mapping[str, Tensor]
) -> tuple[set[str], dict[str, str]]:
    """What transforms of a session did to a part of its model.

    Args:
        tensors: those of the part by its own names.

    Returns:
        Names of what they added: it starts from its initial values by design. By name, what they moved was
        called. All as the part has names.
    """
    names = {id(parameter): name for name, parameter in named_parameters(model).items()}
    added, moved = set(), {}
    for own, tensor in tensors.items():
        name = names.get(id(tensor), own)
        ahead, old = name.removesuffix(own), session.moved.get(name, "")
        if name in session.added:
            added.add(own)
        elif old and old.startswith(ahead):
            moved[own] = old.removeprefix(ahead)
    return added, moved
