"""A frozen model beside the session's: the reference of preference learning, a teacher, a target network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from forge_core.config.tables import RunConfig
from forge_core.errors import PluginError
from forge_core.loop.naming import global_name
from forge_core.loop.transforms import apply_transforms

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession

ALIKE = ("modify", "split", "shard", "data", "materialise")
"""Phases that make a twin what the model is: nothing of it is recomputed, and it is not compiled."""


def frozen_twin(session: TrainingSession) -> nn.Module:
    """A second model like the session's, with the values that its parameters and buffers have now.

    In `forge_auxiliary_models` these are the values that the run starts from, those of `model.init_from`
    among them; a resumed run has the same, for its checkpoint is loaded later. The twin is built by the same
    hooks and divided over the same ranks, in evaluation mode, and no parameter of it has gradients. Run it
    without gradients: `with torch.no_grad(): twin(tokens)`.

    Args:
        session: whose model is built. Where it is on the meta device (`forge explain`), so is the twin.

    Raises:
        PluginError: a plugin builds another model the second time.
    """
    dry = any(parameter.is_meta for parameter in session.model.parameters())
    ask, chosen = session.plugins.choose, session.config[RunConfig].choose
    with torch.device("meta"):
        decoder = ask("forge_build_decoder", chosen, session=session)
        assert decoder is not None  # the core answers if nobody else does
        answer = ask("forge_build_model", chosen, session=session, decoder=decoder.value)
        assert answer is not None
    transforms = session.plugins.collect("forge_model_transforms", session=session)
    twin, _ = apply_transforms(answer.value, transforms, ALIKE[:1] if dry else ALIKE)
    if not dry:
        _copy(session.model, twin)
    return twin.requires_grad_(False).eval()


@torch.no_grad()
def _copy(model: nn.Module, twin: nn.Module) -> None:
    """Take over all values; both are divided alike, so that each rank copies what it has."""
    theirs, ours = (
        {global_name(name): tensor for name, tensor in (*m.named_parameters(), *m.named_buffers())}
        for m in (model, twin)
    )
    if differing := sorted(theirs.keys() ^ ours.keys()):
        raise PluginError(f"a plugin builds another model the second time: {', '.join(differing[:8])}")
    for name, tensor in ours.items():
        tensor.copy_(theirs[name])
