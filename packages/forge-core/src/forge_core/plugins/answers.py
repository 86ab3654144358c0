"""What hooks may answer: kinds read off the specifications, and names that two plugins may not both use."""

from __future__ import annotations

import functools
import inspect
import numbers
import re
import sys
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

MODULE = "an nn.Module"
CALLABLE = "a function"
NUMBER = "a number, nor Flops"
PAIR = 'a pair of "and" or "or" and a function'
WANTED = {
    "forge_build_decoder": MODULE,
    "forge_build_model": MODULE,
    "forge_build_block": MODULE,
    "forge_build_embed": MODULE,
    "forge_build_ffn": MODULE,
    "forge_build_mixer": MODULE,
    "forge_build_initial_weights": CALLABLE,
    "forge_blocks_after": MODULE,
    "forge_auxiliary_models": MODULE,
    "forge_attention_masks": PAIR,
    "forge_before_updates": CALLABLE,
    "forge_after_updates": CALLABLE,
    "forge_evaluators": CALLABLE,
    "forge_flops": NUMBER,
}
"""What an answer, or each of several, is where the specification's annotation does not tell at run time."""
METHODS = {
    "forge_build_data": ("DataPipeline", ("__enter__", "__exit__")),
    "forge_build_forward": ("Forward", ("count", "__call__")),
    "forge_build_generator": ("Generator", ("sample",)),
    "forge_build_step_fn": ("StepFn", ("train", "evaluate")),
    "forge_build_checkpointer": ("Checkpointer", ("load", "due", "save", "staged", "drain", "close")),
}
"""Protocols of answers, and what every run uses of them."""

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
    if answer is None:
        return answer
    if kind is None:
        check_one(plugin, hook, answer)
        return answer
    shape, cls = kind
    wanted = cls.__name__ if cls is not None else WANTED.get(hook, "a value").partition(" ")[2]
    fits = isinstance(answer, Mapping if shape == "Mapping" else Iterable) and not isinstance(answer, str)
    if not fits or (shape == "Iterable" and isinstance(answer, Mapping)):
        expected = (
            f"a mapping of names to {_many(wanted)}" if shape == "Mapping" else f"a list of {_many(wanted)}"
        )
        raise PluginError(f"plugin {plugin}: {hook} returned {_a(answer)}, not {expected}")
    values: Sequence[Any] = list(answer.values()) if shape == "Mapping" else list(answer)
    for value in values:
        if not (_is(value, WANTED.get(hook, "")) if cls is None else isinstance(value, cls)):
            one = _with_article(wanted) if cls is not None else WANTED[hook]
            raise PluginError(f"plugin {plugin}: {hook} has {_a(value)} among its answers, not {one}")
    return answer if shape == "Mapping" else values


def check_one(plugin: str, hook: str, answer: Any) -> None:
    """Refuse the answer to a `forge_build_*` hook that is not what the run is about to use. PluginError."""
    if not _is(answer, WANTED.get(hook, "")):
        raise PluginError(f"plugin {plugin}: {hook} returned {_a(answer)}, not {WANTED[hook]}")
    protocol, names = METHODS.get(hook, ("", ()))
    # static first: asking for a property may already build something
    lacking = [n for n in names if inspect.getattr_static(answer, n, None) is None and not hasattr(answer, n)]
    if lacking or (names and isinstance(answer, type)):
        hint = f"it lacks {', '.join(lacking)}" if lacking else "return an object of it"
        text = f"plugin {plugin}: {hook} returned {_a(answer)}, which is no {protocol}"
        raise PluginError(text, hint)


def _is(value: Any, wanted: str) -> bool:
    """Whether a value is what `WANTED` says; "" is anything."""
    if wanted == MODULE:
        torch = sys.modules.get("torch")  # who makes a module has imported it
        return torch is not None and isinstance(value, torch.nn.Module)
    if wanted == PAIR:
        return isinstance(value, tuple) and len(value) == 2 and value[0] in ("and", "or")
    if wanted == NUMBER:
        return isinstance(value, numbers.Real | contract.Flops)  # numpy's numbers are real, too
    return wanted != CALLABLE or callable(value)


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
    return f"the class {value.__name__}" if isinstance(value, type) else _with_article(type(value).__name__)


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _many(name: str) -> str:
    first, _, rest = name.partition(" of ")
    many = f"{first}es" if first.endswith("s") else f"{first}s"
    return f"{many} of {rest}" if rest else many
