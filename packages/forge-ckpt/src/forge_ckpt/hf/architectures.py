"""Which architecture a folder or a model is of. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from forge_ckpt.errors import RequestError
from forge_ckpt.hf.folders import CONFIG_JSON, read_json
from forge_ckpt.hf.units import find_units
from forge_core.config.config import Config
from forge_core.config.suggest import did_you_mean, nearest
from forge_core.contract import Architecture, UnsuitedError
from forge_core.errors import ForgeError
from forge_core.plugins import Plugins, known_architectures


def known(plugins: Plugins | None = None) -> dict[str, Architecture]:
    """Architectures of the core and of every installed plugin that can be loaded, by `model_type`.

    Args:
        plugins: says what is installed; which of them are active does not matter and is not changed.
    """
    return {each.name: each.architecture for each in known_architectures(plugins)}


@attrs.frozen
class Foreign:
    """A Hugging Face folder's configuration, understood.

    Attributes:
        model_type: of its config.json.
        architecture: how it maps to ours.
        keys: of its config.json.
        tables: ours.
    """

    model_type: str
    architecture: Architecture
    keys: Mapping[str, Any]
    tables: Mapping[str, Mapping[str, Any]]


def read_foreign(folder: Path, plugins: Plugins | None = None) -> Foreign:
    """The configuration of a Hugging Face folder.

    Raises:
        CheckpointError: none there, code of its own, an architecture that nobody knows, or one that says
            something that has no counterpart here.
    """
    path = folder / CONFIG_JSON
    keys = read_json(path)
    if keys.get("auto_map"):
        raise RequestError(
            f"{path} brings code of its own (auto_map), which is never run",
            "if the model is the standard one of its model_type, remove auto_map from the file",
        )
    model_type, all_known = keys.get("model_type"), known(plugins)
    if model_type not in all_known:
        names = sorted(all_known)
        hint = f"known are {', '.join(names)}; a plugin adds its own with forge_architectures"
        near = did_you_mean(nearest(str(model_type), names))
        raise RequestError(f"{path} is of type {model_type!r}, which nothing here knows", near or hint)
    architecture = all_known[model_type]
    if keys.get("quantization_config"):
        raise RequestError(f"{path} is of a quantised model", "take the weights it was made from")
    beside = {name: read_json(folder / name) for name in architecture.beside if (folder / name).is_file()}
    try:
        tables = architecture.read({**keys, **beside})
    except ForgeError as error:
        raise RequestError(f"{path}: {error.message}", error.hint) from error
    return Foreign(model_type, architecture, keys, tables)


def choose(
    config: Config, names: Sequence[str], wanted: str | None = None, plugins: Plugins | None = None
) -> tuple[str, Architecture, dict[str, Any]]:
    """The architecture to write a model as, with the keys of its config.json.

    Args:
        config: of the model. names: of its parameters.
        wanted: a `model_type`; None: the first that has words for the model and rules for its parameters.

    Raises:
        CheckpointError: `wanted` is not known or has no words for the model, or none has; says what it lacks.
    """
    contributed = known_architectures(plugins)
    all_known = {each.name: each.architecture for each in contributed}
    if wanted is not None and wanted not in all_known:
        near = did_you_mean(nearest(wanted, all_known)) or f"known are {', '.join(sorted(all_known))}"
        raise RequestError(f"no architecture is called {wanted!r}", near)
    of_tables = {each.name for each in contributed if each.plugin in config}
    reasons: list[_Reason] = []
    for name in [wanted] if wanted is not None else all_known:
        architecture = all_known[name]
        try:
            keys = architecture.write(config)
        except UnsuitedError as error:
            fits = _has_rules(architecture, config, names)
            reasons.append(_Reason(name in of_tables, fits, error.message, error.hint))
            continue
        except KeyError as error:
            if name in of_tables:
                raise
            # it asks for tables of its own, which this model has not
            reasons.append(_Reason(False, False, f"{name} says {error.args[0] if error.args else error}"))
            continue
        left = find_units(architecture.rules(config), names, theirs=False).unknown
        if not left:
            return name, architecture, keys
        said = f"{name} has no rule for {', '.join(left[:3])}"
        reasons.append(_Reason(name in of_tables, False, said))
    raise _refusal(reasons)


@attrs.frozen
class _Reason:
    """Why a model is not of an architecture.

    Attributes:
        of_tables: the architecture is of a plugin that the configuration has a table of.
        has_rules: it knows all parameters, so that only words are missing.
        message, hint: of the error.
    """

    of_tables: bool
    has_rules: bool
    message: str
    hint: str = ""


def _refusal(reasons: Sequence[_Reason]) -> RequestError:
    """The reasons of the two nearest families. What is said of families of another kind is left out."""
    first = min(reasons, key=lambda r: (not r.of_tables, not r.has_rules, r.message.count(",")))
    alike = [r for r in reasons if (r.of_tables, r.has_rules) == (first.of_tables, first.has_rules)]
    alike.sort(key=lambda r: r.message.count(","))
    messages = list(dict.fromkeys(r.message for r in alike))[:2]
    head = "no architecture of Hugging Face that is known here is this model: "
    return RequestError(head + "; ".join(messages), first.hint)


def _has_rules(architecture: Architecture, config: Config, names: Sequence[str]) -> bool:
    """Whether an architecture knows all parameters, so that only words for them may be missing."""
    try:
        return not find_units(architecture.rules(config), names, theirs=False).unknown
    except (KeyError, ForgeError):  # its tables are not there
        return False
