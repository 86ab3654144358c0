"""Import one plugin, check that it fits, and read off its hook implementations."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from typing import Any

import attrs
import pluggy

from forge_core import hookspecs
from forge_core.errors import PluginError
from forge_core.markers import PROJECT
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
            return self.function(*[arguments[name] for name in self.arguments])
        except Exception as error:
            blame(error, self.plugin, self.version, self.hook)
            raise


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
        PluginError: the import failed, it was built for another `forge_api`, or a hook has a wrong name or argument.
    """
    try:
        module = candidate.load()
    except Exception as error:
        raise PluginError(
            f"plugin {candidate.name} cannot be imported from {candidate.label}: {type(error).__name__}: {error}",
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

    `forge_api` of a plugin is an integer or a pair (lowest, highest); without one it counts as built for this version.
    """
    if stated is None:
        return
    span = stated if isinstance(stated, tuple) else (stated, stated)
    if len(span) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) for n in span):
        raise PluginError(f"plugin {name} states forge_api = {stated!r}", "an integer, or a pair (lowest, highest)")
    if not span[0] <= FORGE_API <= span[1]:
        wanted = str(span[0]) if span[0] == span[1] else f"{span[0]} to {span[1]}"
        raise PluginError(
            f"plugin {name} needs forge_api {wanted}, this forge-core has {FORGE_API}",
            f"install a release of the plugin for forge_api {FORGE_API}",
        )


@functools.cache
def specifications() -> dict[str, tuple[str, ...]]:
    """Every hook and its arguments."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    names = [name for name in vars(hookspecs) if name.startswith("forge_")]
    return {name: tuple(getattr(manager.hook, name).spec.argnames) for name in names}


def implementations_of(module: object, name: str, version: str) -> dict[str, Implementation]:
    """Read the hook implementations of a plugin object; a wrong name or argument is an error that names it."""
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
            raise PluginError(f"plugin {name} implements unknown hook {hook}", f"did you mean {near[0]}?" if near else "")
        if options["wrapper"] or options["hookwrapper"]:
            raise PluginError(f"plugin {name}: {hook} is a hook wrapper", "return a value instead; wrappers are not used")
        function = getattr(module, attribute)
        required, optional = pluggy._hooks.varnames(function)
        unknown = [a for a in required if a not in known[hook]]
        if unknown:
            allowed = ", ".join(known[hook]) or "none"
            raise PluginError(f"plugin {name}: {hook} takes unknown argument {unknown[0]!r}", f"allowed: {allowed}")
        # an argument with a default gets the real value too, which pluggy itself would not pass
        arguments = required + tuple(a for a in optional if a in known[hook])
        rank = 0 if options["tryfirst"] else 2 if options["trylast"] else 1
        found[hook] = Implementation(
            plugin=name, version=version, hook=hook, function=function, arguments=arguments, rank=rank
        )
    return found


def _check_unmarked(module: object, attribute: str, name: str) -> None:
    if attribute in specifications() and callable(getattr(module, attribute)):
        raise PluginError(f"plugin {name}: {attribute} is not marked", "put @forge_core.hookimpl above it")
