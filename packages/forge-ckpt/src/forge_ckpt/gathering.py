"""What a run consists of, taken from a session: tensors by global name, and everything else as trees."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from forge_ckpt.randomness import random_state
from forge_ckpt.tree import split
from forge_core.loop.naming import global_name
from forge_core.optim.build import CONFIGURED_KEYS, LAYOUT_KEYS

if TYPE_CHECKING:
    from forge_core.contract import CheckpointExtra, NamedOptimizer
    from forge_core.loop.session import TrainingSession

SETTLED = ("params", "lr", *LAYOUT_KEYS, *CONFIGURED_KEYS)
"""Keys of a parameter group that are never state."""
NUMBERS: dict[str, tuple[type, torch.dtype]] = {
    "bool": (bool, torch.bool),
    "int": (int, torch.int64),
    "float": (float, torch.float64),
}
"""Numbers in an optimizer's state of a parameter travel as tensors of this dtype, `KEY#int` and so on."""
STATE_VERSION = 1


@attrs.define
class Gathered:
    """Everything of one save on this rank.

    Attributes:
        live: parameters and optimizer state by global name; they change with the next update.
        fixed: other sharded tensors by global name (buffers, sharded extras), which may change at any time.
        rank_tree, rank_tensors: of this rank alone (random state, extras of scope "rank").
        groups: what evolved in parameter groups, by optimizer.
        extras: (plugin, name, version, tree, tensors) of scope "global", on rank 0.
    """

    live: dict[str, Tensor]
    fixed: dict[str, Tensor]
    rank_tree: Any
    rank_tensors: dict[str, Tensor]
    groups: dict[str, list[dict[str, Any]]]
    extras: list[tuple[str, str, int, Any, dict[str, Tensor]]]


class GroupValues:
    """Values of parameter groups that evolve while training (counters, sums), told from configured ones.

    What differs from what it was when the optimizer was built is state; the rest is configuration.
    """

    def __init__(self, optimizers: Mapping[str, NamedOptimizer]) -> None:
        self.built = {
            name: [_plain_values(group) for group in named.optimizer.param_groups]
            for name, named in optimizers.items()
        }
        self.tensors = {
            name: [_tensor_values(group) for group in named.optimizer.param_groups]
            for name, named in optimizers.items()
        }

    def evolved(
        self, optimizers: Mapping[str, NamedOptimizer], names: bool
    ) -> dict[str, list[dict[str, Any]]]:
        """For each optimizer and group: {"name", "values"}, with `param_names` where `names` asks for
        them.

        Raises:
            TypeError: state in a group is a tensor, which would be lost.
        """
        found: dict[str, list[dict[str, Any]]] = {}
        for name, named in optimizers.items():
            groups = []
            begun = zip(self.built[name], self.tensors[name], named.optimizer.param_groups, strict=True)
            for built, fixed, group in begun:
                now = _plain_values(group)
                changed = {k: v for k, v in now.items() if k not in built or built[k] != v}
                tree, tensors = split(changed, f"group {group.get('name')}")
                moved = [
                    key
                    for key, value in _tensor_values(group).items()
                    if key not in fixed or not torch.equal(fixed[key], value)
                ]
                if tensors or moved:
                    which = ", ".join([*tensors, *moved])
                    raise TypeError(f"optimizer {name}: tensors in parameter groups cannot be saved: {which}")
                configured = {key: group[key] for key in CONFIGURED_KEYS if key in group}
                entry = {"name": group.get("name"), "values": tree, "configured": configured}
                if names:
                    entry["param_names"] = list(group.get("param_names", ()))
                groups.append(entry)
            found[name] = groups
        return found


def _plain_values(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value for key, value in group.items() if key not in SETTLED and not isinstance(value, Tensor)
    }


def _tensor_values(group: Mapping[str, Any]) -> dict[str, Tensor]:
    """Copies of the tensors in a group that are no parameters and none of what the configuration settles."""
    return {
        key: value.detach().clone()
        for key, value in group.items()
        if key not in SETTLED and isinstance(value, Tensor)
    }


def gather(session: TrainingSession, values: GroupValues) -> Gathered:
    """Everything that has to be saved, tensors not yet copied. Not collective, unless a plugin's state is.

    Raises:
        TypeError: a state that cannot be saved, named by its place.
    """
    main = session.ranks.is_main
    live = {f"model/{name}": p.detach() for name, p in saved_parameters(session).items()}
    for name, named in session.optimizers.items():
        live |= optimizer_tensors(session, name, named)
    fixed = {f"model/{name}": buffer for name, buffer in persistent_buffers(session).items()}
    rank: dict[str, Any] = {"random": random_state(session.device), "extras": {}}
    whole: list[tuple[str, str, int, Any, dict[str, Tensor]]] = []
    for plugin, extras in session.checkpoint_extras.items():
        for extra in extras:
            if extra.scope == "sharded":
                tree, tensors = split(extra.state_dict(), f"extras/{plugin}/{extra.name}")
                fixed |= tensors
                whole.append((plugin, extra.name, extra.version, tree, {}))
            elif extra.scope == "rank":
                rank["extras"].setdefault(plugin, {})[extra.name] = extra.state_dict()
                whole.append((plugin, extra.name, extra.version, None, {}))
            else:
                whole.append(_global_extra(plugin, extra, main))
    tree, tensors = split(rank, "")
    groups = values.evolved(session.optimizers, names=main)
    return Gathered(live, fixed, tree, tensors, groups, whole if main else [])


def _global_extra(
    plugin: str, extra: CheckpointExtra, main: bool
) -> tuple[str, str, int, Any, dict[str, Tensor]]:
    # called on every rank: reading a global state may take a collective
    tree, tensors = split(extra.state_dict(), "")
    return plugin, extra.name, extra.version, tree, tensors if main else {}


def saved_parameters(session: TrainingSession) -> dict[str, torch.nn.Parameter]:
    """Parameters by global name, frozen ones included, without those that plugins leave out."""
    unsaved = {
        name
        for alias in session.freeze.aliases.values()
        if not alias.saved
        for name in session.freeze.match(alias.name)
    }
    return {name: p for name, p in session.freeze.named.items() if name not in unsaved}


def persistent_buffers(session: TrainingSession) -> dict[str, Tensor]:
    """Buffers that belong to the model's state, by global name."""
    found: dict[str, Tensor] = {}
    for place, module in session.model.named_modules():
        skipped = module._non_persistent_buffers_set
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in skipped:
                found[global_name(f"{place}.{name}" if place else name)] = buffer
    return found


def parameter_names(session: TrainingSession) -> dict[int, str]:
    """Global names of parameters by identity."""
    return {id(p): name for name, p in session.freeze.named.items()}


def optimizer_tensors(session: TrainingSession, name: str, named: NamedOptimizer) -> dict[str, Tensor]:
    """State of every parameter, frozen ones included, as `optimizer/NAME/PARAMETER/KEY`.

    torch's helpers go by `requires_grad` and leave out the moments of what trained once; this does not.
    """
    names = parameter_names(session)
    found: dict[str, Tensor] = {}
    for parameter, state in named.optimizer.state.items():
        if not state:
            continue
        if id(parameter) not in names:
            raise TypeError(f"optimizer {name} has state of a tensor that is no parameter of the model")
        base = f"optimizer/{name}/{names[id(parameter)]}"
        for key, value in state.items():
            if isinstance(value, Tensor):
                found[f"{base}/{key}"] = value.detach()
            else:
                kind = _kind(value, f"{base}/{key}")
                found[f"{base}/{key}#{kind}"] = torch.tensor(value, dtype=NUMBERS[kind][1])
    return found


def _kind(value: Any, place: str) -> str:
    for name, (kind, _) in NUMBERS.items():
        if type(value) is kind:
            return name
    raise TypeError(f"{place}: a {type(value).__name__} in an optimizer's state cannot be saved")


def run_state(session: TrainingSession, step: int) -> tuple[Any, dict[str, Tensor]]:
    """What is one for the whole run: counters, data position, guard; a tree and its tensors."""
    state = {
        "step": step,
        "tokens_seen": session.tokens_seen,
        "data": session.stream.state_dict(),
        "guard": session.guard.state_dict(),
        "freeze_stage": session.freeze.stage,
    }
    return split(state, "run")


def surroundings(session: TrainingSession) -> dict[str, Any]:
    """Where it was saved: mesh, devices, versions of packages and plugins."""
    return {
        "world_size": session.ranks.world_size,
        "data_ranks": session.ranks.data_size,
        "mesh": {axis.name: axis.size for axis in session.mesh.axes if axis.size > 1},
        "device": session.device.type,
        "param_dtype": str(session.param_dtype).removeprefix("torch."),
        "compute_dtype": str(session.compute_dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "plugins": {p.name: p.version for p in session.plugins.loaded.values()},
        "plan": session.plan.fingerprint if hasattr(session, "plan") else "",
    }
