"""What a session's model with experts needs while it runs: one object for its hooks to share."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist
from torch import Tensor, nn

from forge_core.config.tables import TrainConfig
from forge_core.loop.naming import global_name
from forge_moe.balance import Balance
from forge_moe.ffn import AUX, Z, moe_layers
from forge_moe.routers import AUXILIARY
from forge_moe.table import ExpertChoiceOptions, MoeConfig

if TYPE_CHECKING:
    from forge_core import TrainingSession

_known: WeakKeyDictionary[TrainingSession, Balance] = WeakKeyDictionary()
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def balance_of(session: TrainingSession, model: nn.Module) -> Balance:
    """The session's `Balance`, made at the first call; it may have no layer on this rank."""
    if session not in _known:
        moe, known = session.config[MoeConfig], ref(session)  # what is held here would hold the session

        def due(step: int) -> bool:
            owner = known()
            return owner is not None and owner.metrics.due(step)

        _known[session] = Balance(
            {global_name(name): layer for name, layer in moe_layers(model)},
            moe,
            max_steps=session.config[TrainConfig].max_steps,
            due=due,
            reduce=over_data(session),
        )
        declare(session, moe)
    return _known[session]


def declare(session: TrainingSession, moe: MoeConfig) -> None:
    """Make room for the attached losses, so that compiled blocks are compiled once."""
    if moe.router_z_loss_weight:
        session.attached.declare(Z, "positions")
    if moe.aux_loss_weight and moe.router != "expert_choice":
        session.attached.declare(AUX, "sequences" if moe.aux_loss == "sequence" else "positions")
    options = session.options("moe", moe.router)
    if isinstance(options, ExpertChoiceOptions) and options.auxiliary:
        session.attached.declare(AUXILIARY, "positions")


def over_data(session: TrainingSession) -> Callable[[Tensor], None] | None:
    """Adds a tensor up over the ranks that see different tokens and have the same layers, in place."""
    mesh = session.mesh.data_parallel()
    if mesh is None:
        return None
    groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]

    def reduce(tensor: Tensor) -> None:
        for group in groups:
            dist.all_reduce(tensor, group=group)

    return reduce


def places_of(model: nn.Module, indices: Sequence[int]) -> list[int | None]:
    """For each layer with experts, which of this rank's it is; None for one of another rank."""
    found: dict[int, int] = {}
    for place, (name, _) in enumerate(moe_layers(model)):
        match = LAYER.search(global_name(name) + ".")
        if match is not None:
            found[int(match.group(1))] = place
    return [found.get(index) for index in indices]
