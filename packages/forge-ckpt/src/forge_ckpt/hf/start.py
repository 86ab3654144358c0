"""`model.init_from`: weights of a folder into a model that is in memory, on any layout."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor, nn

from forge_ckpt.errors import RequestError
from forge_ckpt.hf.added import added_in
from forge_ckpt.hf.opening import Opened, open_model
from forge_ckpt.hf.weights import Weights
from forge_core.config.config import Config
from forge_core.config.tables import ModelConfig
from forge_core.contract import SplitSpec
from forge_core.data.wording import counted
from forge_core.errors import ConfigError, Problem
from forge_core.loop.naming import global_name
from forge_core.model import copy_full_into
from forge_core.model.architectures import differences
from forge_core.plugins import Plugins

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession

CHANGEABLE = (
    "rope_theta",
    "rope_theta_sliding",
    "rope_scaling",
    "rope_sections",
    "sliding_window",
    "layer_types",
    "attention_softcap",
    "logit_softcap",
    "norm_eps",
)
"""Keys that fit the same tensors and that people change on purpose (a longer context): told, not refused."""


@attrs.frozen
class Coverage:
    """What a load did: names of parameters filled and left alone, and of tensors that nothing took."""

    filled: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def __str__(self) -> str:
        text = f"{counted(len(self.filled), 'parameter')} filled"
        if self.missing:
            text += f", {len(self.missing)} as they were initialised ({_some(self.missing)})"
        if self.unexpected:
            text += f", {counted(len(self.unexpected), 'tensor')} not used ({_some(self.unexpected)})"
        return text


def start_from(session: TrainingSession, model: nn.Module) -> None:
    """Fill the model of a session from the folder that `model.init_from` names.

    Raises:
        ConfigError: the folder's model is another one; every key that differs is named.
        CheckpointError: tensors are missing, unexpected or of another shape; all are listed.
    """
    table = session.config[ModelConfig]
    assert table.init_from is not None
    # a set of its own: opening a folder settles which plugins answer for its configuration
    plugins = Plugins(installed=session.plugins.installed, blocked=session.plugins.blocked)
    opened = open_model(table.init_from, plugins=plugins)
    notices = [*check_model(opened, table), *told_differences(opened, session.config)]
    partial = bool(getattr(session.config.get("checkpoint"), "init_partial", False))
    part = part_named(model, opened.weights.names())
    added, moved = added_in(session, model, tensors_of(part))
    allowed: Any = {"unknown": opened.unknown, "partial": partial, "unsaved": added, "moved": moved}
    coverage = fill(part, opened.weights, opened.where, **allowed)
    if session.ranks.is_main:
        for text in (*notices, f"weights of {opened.where}: {coverage}"):
            session.log.warning(text)


def part_named(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """What a folder's tensors fill: all of a model, or its `text_part` where they are a text model's."""
    part = text_part(model)
    inside = next((name for name, module in model.named_modules() if module is part), "")
    place = f"{global_name(inside)}." if inside else ""
    return model if place and any(name.startswith(place) for name in names) else part


def text_part(model: nn.Module) -> nn.Module:
    """The part of a model that has the names of a text model: what it calls `text_part`, else all of it."""
    part = getattr(model, "text_part", None)
    return part if isinstance(part, nn.Module) else model


def check_model(opened: Opened, table: ModelConfig) -> list[str]:
    """Whether a folder's weights are those of the model that a table describes.

    Returns:
        What differs and fits all the same, in words.

    Raises:
        ConfigError: the other differences.
    """
    saved = opened.config[ModelConfig]
    keys = differences(saved, table)
    # what follows from another key, as the scale of attention from the width of a head, is not said twice
    keys = [key for key in keys if getattr(table, key) != getattr(saved, key)] or keys
    problems = [
        Problem(
            f"model.{key}",
            f"{getattr(table, key)!r}, but the model in {opened.where} has {getattr(saved, key)!r}",
            "change the key, or build on its table: forge import writes it as model.toml",
        )
        for key in keys
        if key not in CHANGEABLE
    ]
    if problems:
        raise ConfigError(problems)
    return [
        f"model.{key} is {getattr(table, key)!r}, in {opened.where} it was {getattr(saved, key)!r}"
        for key in keys
    ]


def told_differences(opened: Opened, config: Config) -> list[str]:
    """What tables of plugins say otherwise than the folder's, in words, where shapes of tensors do not show
    it."""
    found = []
    for name, table in config.tables.items():
        if name not in opened.config or not hasattr(table, "computed"):
            continue
        theirs = opened.config.get(name).computed(opened.config)
        for key, value in table.computed(config).items():
            if key in theirs and theirs[key] != value:
                found.append(f"{key} is {value!r}, in {opened.where} it was {theirs[key]!r}")
    return found


def compare(
    model: nn.Module,
    weights: Weights,
    where: str,
    *,
    unknown: Sequence[str] = (),
    partial: bool = False,
    unsaved: Collection[str] = (),
    moved: Mapping[str, str] | None = None,
) -> tuple[dict[str, str], Coverage]:
    """What weights have for the parameters of a model, or of the part of it that this rank has.

    A tied parameter is looked for under all of its names.

    Args:
        model: parameters may be DTensors, or on the meta device.
        weights: by our global names. where: the folder, for messages.
        unknown: its tensors that have no name of ours.
        partial: let parameters and tensors be left over.
        unsaved: parameters that the weights need not have.
        moved: by name, what parameters are called there that stand elsewhere in the model.

    Returns:
        The name that each parameter has among the weights, and the coverage.

    Raises:
        CheckpointError: lists missing, unexpected and mis-shaped tensors.
    """
    names = names_of(model)
    for name, old in (moved or {}).items():
        names[name].append(old)
    have = set(weights.names())
    places = {first: next((n for n in group if n in have), None) for first, group in names.items()}
    sources = {first: name for first, name in places.items() if name is not None}
    missing = tuple(first for first, name in places.items() if name is None)
    taken = {name for group in names.values() for name in group}
    modules = {global_name(name) for name, _ in model.named_modules()}
    whole = not _is_part(model)
    left = (n for n in weights.names() if n not in taken and (whole or n.rpartition(".")[0] in modules))
    unexpected = (*unknown, *left)
    parameters = tensors_of(model)
    found = {name: weights.info(name).shape for name in sources.values()}
    shapes = [
        f"{source} is {_by(found[source])} in the folder, {_by(parameters[first].shape)} in the model"
        for first, source in sources.items()
        if found[source] != tuple(parameters[first].shape)
    ]
    needed = [name for name in missing if name not in unsaved]
    _refuse(where, () if partial else needed, () if partial else unexpected, shapes)
    return sources, Coverage(tuple(sources), missing, unexpected)


def fill(
    model: nn.Module,
    weights: Weights,
    where: str,
    *,
    unknown: Sequence[str] = (),
    partial: bool = False,
    unsaved: Collection[str] = (),
    moved: Mapping[str, str] | None = None,
) -> Coverage:
    """Copy weights into the parameters of a model in memory, one at a time. Nothing is communicated.

    Args:
        model, weights, where, unknown, partial, unsaved, moved: see `compare`, which also says what is
            refused; nothing has been filled then.
    """
    allowed: Any = {"unknown": unknown, "partial": partial, "unsaved": unsaved, "moved": moved}
    sources, coverage = compare(model, weights, where, **allowed)
    parameters = tensors_of(model)
    for first, source in sources.items():
        copy_full_into(parameters[first].data, weights.read(source).to(parameters[first].dtype))
    return coverage


def _refuse(where: str, missing: Sequence[str], unexpected: Sequence[str], shapes: Sequence[str]) -> None:
    parts = []
    if missing:
        parts.append(f"lacks {len(missing)}: {_some(missing)}")
    if unexpected:
        parts.append(f"has {len(unexpected)} that the model does not: {_some(unexpected)}")
    if shapes:
        parts.append(f"has {len(shapes)} of another shape: {_some(shapes, '; ')}")
    if parts:
        hint = "" if shapes else "checkpoint.init_partial = true takes what fits"
        raise RequestError(f"tensors of {where} do not fit the model: it {'; it '.join(parts)}", hint)


def names_of(model: nn.Module) -> Mapping[str, list[str]]:
    """All global names of each tensor, by its first; names tied across parts of a model, too."""
    groups: dict[int, list[str]] = {}
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *_buffers(model)):
        groups.setdefault(id(tensor), []).append(global_name(name))
    found = {group[0]: group for group in groups.values()}
    for path, module in model.named_modules():
        for tied in _split_of(module).tied:
            names = [global_name(f"{path}.{name}" if path else name) for name in tied]
            for group in found.values():
                if any(name in group for name in names):
                    group += [name for name in names if name not in group]
    return found


def _is_part(model: nn.Module) -> bool:
    """Whether something that the model could have is None: it was split over ranks.

    A part lacks modules of the others, whose tensors are not unexpected then.
    """
    for module in model.modules():
        spec = _split_of(module)
        if any(_lacks(module, name) for name in (*spec.entry, *spec.exit)):
            return True
    return False


def _lacks(module: nn.Module, path: str) -> bool:
    """Whether a submodule, or one that it stands in, is None."""
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name, None)
    return found is None


def _split_of(module: nn.Module) -> SplitSpec:
    """How a module says that it divides, nothing for one that does not."""
    split: Any = getattr(module, "split", None)
    spec = split() if callable(split) else None
    return spec if isinstance(spec, SplitSpec) else SplitSpec(entry=(), blocks="", exit=())


def _some(names: Sequence[str], comma: str = ", ", most: int = 8) -> str:
    left = len(names) - most
    return comma.join(names[:most]) + (f" and {left} more" if left > 0 else "")


def _by(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a number"


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter of a model by global name, a tied one once, and every buffer that is saved."""
    return {global_name(name): tensor for name, tensor in (*model.named_parameters(), *_buffers(model))}


def _buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers that belong to the weights."""
    return [
        (f"{path}.{name}" if path else name, buffer)
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]
