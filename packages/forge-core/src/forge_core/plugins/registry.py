"""The plugins of one process: what is installed, what is loaded, and calls in one fixed order."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from forge_core.config.tables import CORE_TABLES
from forge_core.errors import PluginError
from forge_core.plugins.answers import check_names
from forge_core.plugins.discovery import Candidate, discover
from forge_core.plugins.loading import CORE, Implementation, Plugin, blame, implementations_of, load_plugin
from forge_core.version import __version__


@attrs.frozen(kw_only=True)
class Contribution:
    """One thing a plugin contributed: who, through which hook, and the thing."""

    plugin: str
    version: str
    hook: str
    value: Any


class Plugins:
    """Installed and loaded plugins.

    Args:
        installed: candidates to choose from; None finds the installed packages.
        builtins: objects that hold the core's own hook implementations; None takes forge_core.builtin.
        blocked: names that may not be loaded.
    """

    def __init__(
        self,
        installed: Iterable[Candidate] | None = None,
        builtins: Iterable[object] | None = None,
        blocked: Iterable[str] = (),
    ) -> None:
        self.installed = tuple(discover() if installed is None else installed)
        self.blocked = frozenset(blocked)
        self.loaded: dict[str, Plugin] = {}
        self.active: frozenset[str] | None = None
        if builtins is None:
            from forge_core.builtin import BUILTINS

            builtins = BUILTINS
        self.core = tuple(
            Plugin(
                name=CORE,
                version=__version__,
                source=getattr(module, "__name__", type(module).__name__),
                implementations=implementations_of(module, CORE, __version__),
            )
            for module in builtins
        )

    @classmethod
    def isolated(cls, plugins: Mapping[str, object] | None = None) -> Plugins:
        """Plugins that see nothing of what is installed, only the objects given by name (for tests)."""
        given = plugins or {}
        sources = {name: getattr(value, "__name__", type(value).__name__) for name, value in given.items()}
        candidates = [
            Candidate(name=name, source=sources[name], version="0", loaded=value)
            for name, value in given.items()
        ]
        return cls(installed=sorted(candidates, key=lambda c: c.name))

    def names(self) -> tuple[str, ...]:
        """Names of installed plugins, sorted."""
        return tuple(sorted({candidate.name for candidate in self.installed}))

    def load(self, name: str) -> Plugin:
        """The plugin called `name`, imported and checked at the first call.

        Raises:
            KeyError: none of that name is installed.
            PluginError: it is blocked, broken, built for another contract, or two packages claim the name.
        """
        if name in self.loaded:
            return self.loaded[name]
        candidates = [c for c in self.installed if c.name == name]
        if not candidates:
            raise KeyError(name)
        # two packages that name one module bring one plugin
        if len({(c.source, id(c.loaded)) for c in candidates}) > 1:
            labels = " and ".join(c.label for c in candidates)
            raise PluginError(f"two plugins are called {name}: {labels}", "uninstall one of them")
        if name == CORE or name in CORE_TABLES:
            raise PluginError(f"{candidates[0].label} calls itself {name}, a name that belongs to forge-core")
        if name in self.blocked:
            raise PluginError(f"plugin {name} is blocked", "remove it from FORGE_BLOCK")
        plugin = load_plugin(candidates[0])
        self.loaded[name] = plugin
        return plugin

    def activate(self, names: Iterable[str]) -> None:
        """Let exactly these plugins answer hooks: those whose tables a configuration has.

        A plugin that is loaded for one of its components alone answers none. Until the first call all loaded
        plugins do.
        """
        self.active = frozenset(names)

    def broken(self) -> dict[str, PluginError]:
        """Try every installed plugin; the errors by name. Working ones are not activated by this."""
        errors: dict[str, PluginError] = {}
        active = dict(self.loaded)
        for name in self.names():
            try:
                self.load(name)
            except PluginError as error:
                errors[name] = error
        self.loaded = active
        return errors

    def implementations(self, hook: str) -> list[Implementation]:
        """Active implementations in the one order: tryfirst, plain, trylast; in each core, then by name."""
        names = [name for name in sorted(self.loaded) if self.active is None or name in self.active]
        owners = [*self.core, *(self.loaded[name] for name in names)]
        found = [p.implementations[hook] for p in owners if hook in p.implementations]
        return sorted(found, key=lambda i: (i.rank, not i.is_core, "" if i.is_core else i.plugin))

    def collect(self, hook: str, **arguments: Any) -> list[Contribution]:
        """All contributions to a plural hook, flattened, in order. Mappings give (name, value) pairs."""
        found = [c for i in self.implementations(hook) for c in self.contributions(i, **arguments)]
        check_names(hook, found)
        return found

    @staticmethod
    def contributions(implementation: Implementation, **arguments: Any) -> list[Contribution]:
        """What one plugin contributes to a plural hook, in its order."""
        answer = implementation(arguments)
        values = list(answer.items()) if isinstance(answer, Mapping) else list(answer or ())
        by = {"plugin": implementation.plugin, "version": implementation.version, "hook": implementation.hook}
        return [Contribution(**by, value=value) for value in values]

    def choose(
        self, hook: str, choice: Mapping[str, str] | None = None, **arguments: Any
    ) -> Contribution | None:
        """The one answer to a `forge_build_*` hook; None if all decline.

        `choice` is `[run.choose]`: hook name without "forge_build_" -> plugin. What the chosen plugin
        declines (the part of one layer, say) is settled among the others as if nothing were chosen.

        Raises:
            PluginError: two plugins answer and none is chosen, or the chosen one has no such hook.
        """
        short = hook.removeprefix("forge_build_")
        wanted = (choice or {}).get(short)
        everybody = self.implementations(hook)
        first = [i for i in everybody if i.plugin == wanted]
        if wanted is not None and not first:
            raise PluginError(f"run.choose.{short} = {wanted!r}, but that plugin does not answer {hook}")
        if chosen := self._answers(first, arguments):
            return chosen[0]
        others = [i for i in everybody if i.plugin != wanted]
        answers = self._answers([i for i in others if not i.is_core], arguments)
        if len(answers) > 1:
            names = " and ".join(a.plugin for a in answers)
            raise PluginError(
                f"{names} both answer {hook}", f'choose one: [run.choose] {short} = "{answers[0].plugin}"'
            )
        answers = answers or self._answers([i for i in others if i.is_core], arguments)
        return answers[0] if answers else None

    @staticmethod
    def _answers(implementations: Iterable[Implementation], arguments: dict[str, Any]) -> list[Contribution]:
        """The answers that are not None, in order."""
        given = ((i, i(arguments)) for i in implementations)
        return [
            Contribution(plugin=i.plugin, version=i.version, hook=i.hook, value=value)
            for i, value in given
            if value is not None
        ]


def blame_frames(error: BaseException, plugins: Iterable[Plugin]) -> None:
    """Note which plugin an exception comes from by the code it passed through, if nothing says so yet.

    Modules, optimizers and streams of a plugin run in the loop as they are, without a wrapper that could name
    it. The innermost frame that belongs to exactly one plugin's top package counts.
    """
    if any(note.startswith("raised by plugin") for note in getattr(error, "__notes__", ())):
        return
    owners: dict[str, list[Plugin]] = {}
    for plugin in plugins:
        owners.setdefault(plugin.source.partition(":")[0].partition(".")[0], []).append(plugin)
    frames = [
        (frame.f_globals.get("__name__", ""), frame) for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    for module, frame in reversed(frames):
        found = owners.get(module.partition(".")[0], [])
        if len(found) == 1:
            blame(error, found[0].name, found[0].version, f"{module}.{frame.f_code.co_qualname}")
            return


def attributed(contribution: Contribution, function: Any) -> Any:
    """`function` with its plugin noted on what it raises in the loop; the core's own is left as it is."""
    if contribution.plugin == CORE:
        return function

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            blame(error, contribution.plugin, contribution.version, contribution.hook)
            raise

    return run
