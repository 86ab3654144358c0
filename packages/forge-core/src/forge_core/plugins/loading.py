"""Import one plugin, check that it fits, and read off its hook implementations."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pluggy

from forge_core import hookspecs
from forge_core.errors import PluginError
from forge_core.markers import PROJECT
from forge_core.plugins.answers import check_answer
from forge_core.plugins.discovery import Candidate
from forge_core.version import FORGE_API

CORE = "core"


@attrs.frozen(kw_only=True)
class Implementation:
    """One plugin's implementation of one hook, ready to be called with the arguments it takes."""

    plugin: str
    version: str
    hook: str
    function: Callable[..., Any]
    arguments: tuple[str, ...]
    rank: int  # 0 tryfirst, 1 plain, 2 trylast

    @property
    def is_core(self) -> bool:
        return self.plugin == CORE

    def __call__(self, arguments: dict[str, Any]) -> Any:
        try:
            answer = self.function(**{name: arguments[name] for name in self.arguments})
            # a generator runs here, so that what it raises is blamed on its plugin too
            answer = list(answer) if isinstance(answer, Iterator) else answer
        except Exception as error:
            if not self.is_core:
                blame(error, self.plugin, self.version, self.hook)
            raise
        return check_answer(self.plugin, self.hook, answer)


@attrs.frozen(kw_only=True)
class Plugin:
    """A loaded plugin: its object and its hook implementations by hook name."""

    name: str
    version: str
    source: str
    implementations: dict[str, Implementation]

    def call(self, hook: str, **arguments: Any) -> Any:
        """Call this plugin's own `hook`; None where it has none."""
        implementation = self.implementations.get(hook)
        return None if implementation is None else implementation(arguments)


def blame(error: BaseException, plugin: str, version: str, hook: str) -> None:
    """Note on an exception which plugin it came from, once; type and traceback stay."""
    note = f"raised by plugin {plugin} {version} in {hook}".replace("  ", " ")
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def load_plugin(candidate: Candidate) -> Plugin:
    """Import `candidate` and check it.

    Raises:
        PluginError: the import failed, it was built for another `forge_api`, or a hook has a wrong name or
            argument.
    """
    try:
        module = candidate.load()
    except (Exception, SystemExit) as error:  # a module that ends the process when imported is broken, too
        reason = f"{type(error).__name__}: {error}"
        raise PluginError(
            f"plugin {candidate.name} cannot be imported from {candidate.label}: {reason}",
            "mend or uninstall that package",
        ) from error
    check_api(candidate.name, getattr(module, "forge_api", None))
    return Plugin(
        name=candidate.name,
        version=candidate.version,
        source=candidate.source,
        implementations=implementations_of(module, candidate.name, candidate.version),
    )


def check_api(name: str, stated: object) -> None:
    """Refuse a plugin built for another contract.

    `forge_api` of a plugin is an integer or a pair (lowest, highest); without one it counts as built for this
    version.
    """
    if stated is None:
        return
    span = stated if isinstance(stated, tuple) else (stated, stated)
    if len(span) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) for n in span):
        hint = "an integer, or a pair (lowest, highest)"
        raise PluginError(f"plugin {name} states forge_api = {stated!r}", hint)
    if not span[0] <= FORGE_API <= span[1]:
        wanted = str(span[0]) if span[0] == span[1] else f"{span[0]} to {span[1]}"
        raise PluginError(
            f"plugin {name} needs forge_api {wanted}, this forge-core has {FORGE_API}",
            f"install a release of the plugin for forge_api {FORGE_API}",
        )


@functools.cache
def specifications() -> dict[str, tuple[str, ...]]:
    """Every hook and its arguments."""
    names = [name for name in vars(hookspecs) if name.startswith("forge_")]
    return {name: tuple(inspect.signature(getattr(hookspecs, name)).parameters) for name in names}


def implementations_of(module: object, name: str, version: str) -> dict[str, Implementation]:
    """The hook implementations of a plugin object; a wrong name or argument is an error that names it."""
    manager = pluggy.PluginManager(PROJECT)
    known = specifications()
    found: dict[str, Implementation] = {}
    for attribute in sorted(dir(module)):
        options = manager.parse_hookimpl_opts(module, attribute)
        if options is None:
            _check_unmarked(module, attribute, name)
            continue
        hook = options.get("specname") or attribute
        if hook not in known:
            near = difflib.get_close_matches(hook, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else ""
            raise PluginError(f"plugin {name} implements unknown hook {hook}", hint)
        if options["wrapper"] or options["hookwrapper"]:
            hint = "return a value instead; wrappers are not used"
            raise PluginError(f"plugin {name}: {hook} is a hook wrapper", hint)
        function = getattr(module, attribute)
        if hook in found:
            hint = "one function a hook; return a list from it"
            raise PluginError(f"plugin {name} implements {hook} twice", hint)
        rank = 0 if options["tryfirst"] else 2 if options["trylast"] else 1
        arguments = _arguments(function, hook, name)
        found[hook] = Implementation(
            plugin=name, version=version, hook=hook, function=function, arguments=arguments, rank=rank
        )
    return found


def _arguments(function: Callable[..., Any], hook: str, name: str) -> tuple[str, ...]:
    """What to pass. An argument of the hook that has a default gets the real value all the same."""
    allowed = specifications()[hook]
    taken: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in allowed and parameter.kind is not parameter.POSITIONAL_ONLY:
            taken.append(parameter.name)
        elif parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_ONLY,
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        ):
            hint = f"allowed: {', '.join(allowed) or 'none'}; passed by keyword"
            raise PluginError(f"plugin {name}: {hook} takes unknown argument {parameter.name!r}", hint)
    return tuple(taken)


def _check_unmarked(module: object, attribute: str, name: str) -> None:
    """A function that has a hook's name, or nearly one, and no marker would never be called."""
    if not attribute.startswith("forge_") or not inspect.isroutine(getattr(module, attribute)):
        return
    for near in difflib.get_close_matches(attribute, specifications(), n=1, cutoff=0.9):
        hint = "put @forge_core.hookimpl above it"
        hint = hint if near == attribute else f"did you mean {near}? Then {hint}"
        raise PluginError(f"plugin {name}: {attribute} is not marked as a hook", hint)
