"""The text model inside a family that sees: any family of text that is known, under a prefix of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from forge_core.config import Config
from forge_core.config.tables import ModelConfig
from forge_core.contract import Architecture, TensorRule, UnsuitedError
from forge_core.contract.architecture import inside
from forge_core.errors import ForgeError
from forge_core.model.architectures import decoder_rules
from forge_core.plugins import CORE, Known, known_architectures

HF = Mapping[str, Any]
Tables = dict[str, dict[str, Any]]
DECODER = "decoder."
"""What comes before the names of a decoder's parameters inside a model that sees."""


def read_text(config: HF, *, default: str = "llama", tied: bool | None = None) -> dict[str, Any]:
    """Keys of `[model]` from the nested `text_config`; other tables that it needs come by `with_text`.

    Args:
        config: theirs, the whole.
        default: the `model_type` where it says none.
        tied: whether head and embedding share a weight; None: as `text_config` or its family says.

    Raises:
        ForgeError: a text family that is not offered, or what it refuses.
    """
    text = dict(config.get("text_config") or {})
    families = {each.name: each.architecture for each in _families()}
    name = text.get("model_type", default)
    if name not in families:
        hint = f"one of {', '.join(families)} is; a plugin adds its own with forge_architectures"
        raise ForgeError(f"a text model of type {name!r} is not offered", hint)
    if tied is not None:
        text["tie_word_embeddings"] = tied
    return _read(families[name], text)["model"]


def _read(family: Architecture, text: HF) -> Tables:
    filled = {**family.defaults, **{key: value for key, value in text.items() if value is not None}}
    # a key that is null on purpose: no window, no cap
    filled |= {key: None for key, value in text.items() if value is None and key in family.defaults}
    return family.read(filled)


def with_text(architecture: Architecture) -> Architecture:
    """An architecture whose `read` also gives the tables beside `[model]` that the text family needs."""

    def read(config: HF) -> Tables:
        tables = architecture.read(config)
        text = config.get("text_config") or {}
        family = next((each for each in _families() if each.name == text.get("model_type")), None)
        if family is None or family.plugin == CORE:
            return tables
        return {**_read(family.architecture, text), **tables}

    return attrs.evolve(architecture, read=read)


def _families() -> list[Known]:
    """All that are of text alone."""
    return [each for each in known_architectures() if each.architecture.text]


def _fitting(config: Config) -> list[Known]:
    """Those of the plugins whose tables a model has, or else the core's."""
    families = _families()
    ours = [each for each in families if each.plugin in config.plugins]
    return ours or [each for each in families if each.plugin == CORE]


def write_text(config: Config, names: Iterable[str] = ()) -> dict[str, Any]:
    """The nested `text_config` of the first text family that has words for the decoder.

    Args:
        names: of families that come into question; none: all.

    Raises:
        UnsuitedError: none has; says why the nearest does not.
    """
    reasons = []
    for each in _fitting(config):
        if names and each.name not in names:
            continue
        try:
            keys = each.architecture.write(config)
        except UnsuitedError as error:
            reasons.append(error.message)
            continue
        return {"model_type": each.name, "architectures": [each.architecture.class_name], **keys}
    if not reasons:
        raise UnsuitedError(f"its text model is {' or '.join(names)}")
    raise UnsuitedError(min(reasons, key=lambda reason: reason.count(",")))


def text_rules(config: Config, places: Sequence[tuple[str, str]]) -> list[TensorRule]:
    """Rules of the decoder's tensors.

    Args:
        config: resolved.
        places: for each layout of their files what comes before the names of the text model, with its dot,
            and the name of the head; the first is the one that is written.
    """
    rules = _rules(config)
    return [
        inside(rule, theirs={"model.": theirs, "lm_head": head}, ours=DECODER)
        for theirs, head in places
        for rule in rules
    ]


def _rules(config: Config) -> Sequence[TensorRule]:
    """Of the text family that `write_text` takes, or of a dense decoder where none has words."""
    for each in _fitting(config):
        try:
            each.architecture.write(config)
        except UnsuitedError:
            continue
        return each.architecture.rules(config)
    return decoder_rules(config[ModelConfig])


def as_read(config: Config) -> dict[str, Any]:
    """Keys of `[model]` as the text family that `write_text` takes reads back what it wrote; none without."""
    for each in _fitting(config):
        try:
            keys = each.architecture.write(config)
        except UnsuitedError:
            continue
        return dict(each.architecture.read(keys)["model"])
    return {}
