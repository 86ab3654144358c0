"""Whether a configuration that is written says all of the model: it is read back and compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from forge_core.config import Config
from forge_core.config.tables import ModelConfig, RopeScalingConfig
from forge_core.contract import UnsuitedError
from forge_core.model.architectures import differences
from forge_vlm.architectures.text import as_read
from forge_vlm.architectures.towers import check_encoder
from forge_vlm.table import VlmConfig

Read = Callable[[Mapping[str, Any]], dict[str, dict[str, Any]]]
PARTS = ("encoder", "connector")


def faithful(
    name: str, write: Callable[[Config], dict[str, Any]], read: Read
) -> Callable[[Config], dict[str, Any]]:
    """`Architecture.write` from one that puts down what the family has words for.

    Whether that was everything is found out by reading it back: where the model would be another one, the
    answer raises `UnsuitedError` with the keys at fault.

    Args:
        name: the `model_type`, for messages.
        write: resolved configuration with `[vlm]` -> keys. read: see `Architecture`.
    """

    def written(config: Config) -> dict[str, Any]:
        if "vlm" not in config:
            raise UnsuitedError(f"{name} sees, which the model does not")
        check_encoder(config)
        keys = write(config)
        lost = _lost(read(keys), config)
        if lost:
            raise UnsuitedError(f"{name} has no word for {', '.join(lost)}")
        return keys

    return written


def part_values(path: str, config: Config) -> dict[str, Any]:
    """What a part computes with, by key under its table: which it is, and all of its options.

    Args:
        path: of its table, "vlm" for the fusion.
    """
    vlm = config[VlmConfig]
    key, name = ("fusion", vlm.fusion) if path == "vlm" else ("name", getattr(vlm, path[4:]).name)
    options = config.options(path, name)
    values = {} if options is None else settled_values(options, config)
    return {key: name, **{f"{name}.{option}": value for option, value in values.items()}}


def _lost(back: Mapping[str, Mapping[str, Any]], config: Config) -> list[str]:
    """Keys that would be others if what was written were read, as they are."""
    model = config[ModelConfig]
    unneeded = as_read(config)  # what the text family does without, it was asked about already
    needless = differences(model, _model_of(unneeded)) if unneeded else []
    keys = [key for key in differences(model, _model_of(back["model"])) if key not in needless]
    lost = [f"model.{key} = {getattr(model, key)}" for key in keys]
    theirs = back["vlm"]
    vlm = config[VlmConfig]
    for part in PARTS:
        lost += _of_part(f"vlm.{part}", getattr(vlm, part).name, theirs[part], config)
    return lost + _of_part("vlm", vlm.fusion, {"name": theirs["fusion"], **theirs}, config)


def _model_of(keys: Mapping[str, Any]) -> ModelConfig:
    again = dict(keys)
    scaling = RopeScalingConfig(**again.pop("rope_scaling", {}))
    return ModelConfig(**again, rope_scaling=scaling)


def _of_part(path: str, name: str, theirs: Mapping[str, Any], config: Config) -> list[str]:
    """What differs between options of ours and of the same part as it was read back."""
    key = "vlm.fusion" if path == "vlm" else f"{path}.name"
    if theirs["name"] != name:
        return [f"{key} = {name}"]
    ours: Any = config.options(path, name)
    if ours is None:
        return []
    again = type(ours)(**theirs.get(name, {}))
    one, other = (settled_values(options, config) for options in (ours, again))
    return [f"{path}.{name}.{k} = {v}" for k, v in one.items() if not _same(v, other[k])]


def settled_values(options: Any, config: Config) -> dict[str, Any]:
    """Values of options with nothing left to derive: what a checkpoint says of an encoder is filled in."""
    settle = getattr(options, "settled", None)
    values: dict[str, Any] = attrs.asdict(options if settle is None else settle())
    if "hidden_dim" in values and values["hidden_dim"] is None:
        values["hidden_dim"] = config[ModelConfig].dim
    return values


def _same(one: Any, other: Any) -> bool:
    """Equal, numbers to a part in 10^6: files hold them in decimal."""
    if isinstance(one, float) and isinstance(other, int | float):
        return abs(one - other) <= 1e-6 * max(abs(one), abs(other))
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
