"""What hooks may answer: kinds read off the specifications, and names that two plugins may not both use."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge_core import contract, hookspecs
from forge_core.errors import PluginError, Problem

if TYPE_CHECKING:
    from forge_core.plugins.registry import Contribution

UNIQUE = {
    "forge_mesh_axes": "mesh axis",
    "forge_auxiliary_models": "auxiliary model",
    "forge_module_aliases": "alias",
    "forge_extra_losses": "loss term",
    "forge_extra_metrics": "metric",
    "forge_evaluators": "evaluator",
    "forge_architectures": "architecture",
}
"""Hooks whose answers carry names that belong to one plugin only."""

_KIND = re.compile(r"(Iterable|Mapping)\[(?:str, )?([\w.]+)\]")


@functools.cache
def kind_of(hook: str) -> tuple[str, type | None] | None:
    """("Iterable" | "Mapping", class of the elements) that a hook answers with, None for anything else.

    The class is None where it cannot be told apart at run time (protocols, torch's classes).
    """
    found = _KIND.search(str(inspect.signature(getattr(hookspecs, hook)).return_annotation))
    if found is None:
        return None
    cls: Any = Problem if found[2] == "Problem" else getattr(contract, found[2], None)
    plain = isinstance(cls, type) and cls is not Any and not getattr(cls, "_is_protocol", False)
    return found[1], cls if plain else None


def check_answer(plugin: str, hook: str, answer: Any) -> Any:
    """The answer, a list or mapping where the hook asks for one; what does not fit is an error.

    Raises:
        PluginError: names plugin, hook, what came and what was expected.
    """
    kind = kind_of(hook)
    if kind is None or answer is None:
        return answer
    shape, cls = kind
    wanted = cls.__name__ if cls is not None else "value"
    fits = isinstance(answer, Mapping if shape == "Mapping" else Iterable) and not isinstance(answer, str)
    if not fits or (shape == "Iterable" and isinstance(answer, Mapping)):
        expected = f"a mapping of names to {wanted}s" if shape == "Mapping" else f"a list of {wanted}s"
        raise PluginError(f"plugin {plugin}: {hook} returned {_a(answer)}, not {expected}")
    values: Sequence[Any] = list(answer.values()) if shape == "Mapping" else list(answer)
    for value in values:
        if cls is not None and not isinstance(value, cls):
            raise PluginError(f"plugin {plugin}: {hook} has {_a(value)} among its answers, not a {wanted}")
    return answer if shape == "Mapping" else values


def check_names(hook: str, found: Iterable[Contribution]) -> None:
    """Refuse one name from two sides: the second would silently replace the first, or be added to it.

    Raises:
        PluginError: names both plugins.
    """
    if hook not in UNIQUE:
        return
    owners: dict[str, str] = {}
    for c in found:
        name = c.value[0] if isinstance(c.value, tuple) else c.value.name
        if name in owners:
            first, second = owners[name], c.plugin
            who = f"{first} has twice" if first == second else f"plugins {first} and {second} both have"
            raise PluginError(f"{who} the {UNIQUE[hook]} {name!r}", "names start with the plugin's own")
        owners[name] = c.plugin


def _a(value: object) -> str:
    name = value.__name__ if isinstance(value, type) else type(value).__name__
    return f"the class {name}" if isinstance(value, type) else f"a {name}"
