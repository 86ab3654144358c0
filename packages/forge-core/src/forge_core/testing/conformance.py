"""What every plugin has to hold, as tests that a plugin inherits in a few lines:

from forge_core.testing import PluginConformance

class TestMine(PluginConformance):
    plugin = "mine"
    config = {"mine": {"weight": 0.1}}
"""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import SkipTest

from forge_core.config.fields import METADATA
from forge_core.config.shape import fields_of, inner_tables
from forge_core.distributed.layout import fitting_axes
from forge_core.errors import ConfigError, Problem
from forge_core.plugins import Candidate, PluginCatalog, Plugins, discover
from forge_core.testing.tiny import TinyRun, run_tiny, tiny_config, tiny_session

NAMED = ("forge_extra_losses", "forge_extra_metrics", "forge_evaluators")
"""Hooks whose contributions end up as names in metrics.jsonl."""
BARE = """
import importlib, sys
from forge_core.plugins import Plugins, PluginCatalog, Candidate
name, source = sys.argv[1:]
plugins = Plugins(installed=[Candidate(name=name, source=source)])
catalog = PluginCatalog(plugins)
catalog.table(name)
for component in catalog.components_of(name).values():
    catalog.options(component)
sys.exit("torch was imported" if "torch" in sys.modules else 0)
"""


class PluginConformance:
    """Inherit from it, and pytest runs its tests for your plugin.

    Attributes:
        plugin: name of the plugin, which is the name of its table.
        config: tables of a run that uses it, laid over those of `tiny_config`; its own table is added if it
            is not there.
        needs: further installed plugins that may take part.
        module: the plugin itself, for one that is not installed.
        steps: updates of the test runs.
    """

    plugin: ClassVar[str]
    config: ClassVar[Mapping[str, Any]] = {}
    needs: ClassVar[tuple[str, ...]] = ()
    module: ClassVar[object | None] = None
    steps: ClassVar[int] = 3

    def candidates(self) -> list[Candidate]:
        """The plugin and what it needs, and nothing else that happens to be installed."""
        found = [c for c in discover() if c.name in (self.plugin, *self.needs)]
        if self.module is None:
            return found
        source = getattr(self.module, "__name__", type(self.module).__name__)
        own = Candidate(name=self.plugin, source=source, version="0", loaded=self.module)
        return [c for c in found if c.name != self.plugin] + [own]

    def plugins(self) -> Plugins:
        return Plugins(installed=self.candidates())

    def tables(self) -> dict[str, Any]:
        return {self.plugin: {}, **self.config}

    def run(self) -> TinyRun:
        plugins = self.plugins()
        return run_tiny(tiny_config(plugins=plugins, **self.tables()), plugins, steps=self.steps)

    def test_it_loads(self) -> None:
        names = [c.name for c in self.candidates()]
        assert names.count(self.plugin) == 1, f"{self.plugin} is found {names.count(self.plugin)} times"
        loaded = self.plugins().load(self.plugin)
        assert loaded.implementations, "no hook is implemented; is @forge_core.hookimpl missing?"

    def test_it_states_the_contract_it_was_built_for(self) -> None:
        module = next(c for c in self.candidates() if c.name == self.plugin).load()
        stated = getattr(module, "forge_api", None)
        assert stated is not None, "write `forge_api = 1` (the forge_core.FORGE_API you tested with)"

    def test_every_key_says_what_it_is(self) -> None:
        cls = self._table()
        silent = [path for path, meta in _keys(cls) if meta is None or not meta.help]
        assert not silent, f"keys without help: {', '.join(silent)}; declare them with forge_core.config.key"
        assert cls.__doc__, f"the class of [{self.plugin}] has no docstring, which is the table's help"

    def test_its_configuration_survives_being_written(self) -> None:
        """The resolved configuration that a run leaves behind loads to the same tables."""
        from forge_core.commands.loading import load

        plugins = self.plugins()
        config = tiny_config(plugins=plugins, **self.tables())
        with _file(config.to_toml()) as path:
            again, _ = load(path, [], plugins=self.plugins())
        assert again.get(self.plugin) == config.get(self.plugin)

    def test_an_unknown_key_is_refused(self) -> None:
        own = self.tables()[self.plugin]
        wrong = {**(own if isinstance(own, Mapping) else {}), "no_such_key": 1}
        try:
            tiny_config(plugins=self.plugins(), **{**self.tables(), self.plugin: wrong})
        except ConfigError as error:
            paths = [problem.path for problem in error.problems]
            assert f"{self.plugin}.no_such_key" in paths, f"refused, but for {paths}"
        else:
            raise AssertionError(f"{self.plugin}.no_such_key was accepted")

    def test_problems_come_as_problems(self) -> None:
        plugins = self.plugins()
        config = tiny_config(plugins=plugins, **self.tables())
        contributed = plugins.collect("forge_mesh_axes", config=config)
        for world_size in (1, 2, 8):
            axes = fitting_axes([c.value for c in contributed], world_size)
            given = {"config": config, "world_size": world_size, "axes": axes}
            found = plugins.load(self.plugin).call("forge_problems", **given)
            assert all(isinstance(problem, Problem) for problem in found or ())

    def test_importing_it_imports_no_torch(self) -> None:
        """`forge check` and `forge plugins` must stay quick: module, table and options come without torch."""
        if self.module is not None and not hasattr(self.module, "__file__"):
            raise SkipTest("the plugin is an object, not a module")
        source = next(c.source for c in self.candidates() if c.name == self.plugin)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", BARE, self.plugin, source]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr

    def test_it_trains_and_does_so_again(self) -> None:
        first, second = self.run(), self.run()
        assert len(first.losses) == self.steps
        assert all(first.oks), "an update was skipped"
        assert first.losses == second.losses, "two runs from one seed have different losses"
        assert first.weights.keys() == second.weights.keys()
        different = [name for name, w in first.weights.items() if not w.equal(second.weights[name])]
        assert not different, f"two runs from one seed end with different {', '.join(different)}"

    def test_the_plan_does_not_depend_on_the_order_of_installation(self) -> None:
        prints = set()
        for candidates in (self.candidates(), self.candidates()[::-1]):
            plugins = Plugins(installed=candidates)
            with tiny_session(tiny_config(plugins=plugins, **self.tables()), plugins) as session:
                prints.add(session.plan.fingerprint)
        assert len(prints) == 1, "the plan is not the same twice"

    def test_it_changes_nothing_where_it_is_not_named(self) -> None:
        alone = run_tiny(steps=self.steps)
        plugins = self.plugins()
        beside = run_tiny(tiny_config(plugins=plugins), plugins, steps=self.steps)
        assert not plugins.loaded
        assert alone.losses == beside.losses
        assert all(w.equal(beside.weights[name]) for name, w in alone.weights.items())

    def test_what_it_measures_carries_its_name(self) -> None:
        plugins = self.plugins()
        with tiny_session(tiny_config(plugins=plugins, **self.tables()), plugins) as session:
            entries = [e for e in session.plan.entries if e.plugin == self.plugin and e.hook in NAMED]
        names = [entry.what.partition(":")[0] for entry in entries]
        foreign = [name for name in names if not _belongs(name, self.plugin)]
        assert not foreign, f"{foreign} must be called {self.plugin} or {self.plugin}/..."

    def test_its_checkpoint_extras_go_round(self) -> None:
        run = self.run()
        extras = run.session.checkpoint_extras.get(self.plugin, ())
        names = [extra.name for extra in extras]
        assert len(set(names)) == len(names), f"two extras of one name: {names}"
        for extra in extras:
            state = copy.deepcopy(extra.state_dict())
            assert not list(_not_plain(state, extra.name)), list(_not_plain(state, extra.name))
            assert extra.scope in ("global", "rank", "sharded"), extra.scope
            if extra.compatible is not None:
                assert extra.compatible(extra.version, state) == "", "it refuses its own state"
            extra.load_state_dict(copy.deepcopy(state))
            assert _equal(extra.state_dict(), state), f"{extra.name} is different after loading"

    def test_nothing_holds_a_run_that_has_ended(self) -> None:
        """What a module keeps of a session for as long as the process lives keeps its model, too."""
        plugins = self.plugins()
        with tiny_session(tiny_config(plugins=plugins, **self.tables()), plugins) as session:
            ended = weakref.ref(session)
        del session
        gc.collect()
        assert ended() is None, "the session is still held; keep what refers to it weakly"

    def _table(self) -> type:
        cls = PluginCatalog(self.plugins()).table(self.plugin)
        if cls is None:
            raise SkipTest(f"[{self.plugin}] takes no keys")
        return cls


def _belongs(name: str, plugin: str) -> bool:
    return name == plugin or name.startswith((f"{plugin}/", f"{plugin}_"))


def _keys(cls: type, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a table and of the tables in it, with its metadata."""
    for field in fields_of(cls).values():
        path = f"{at}{field.name}"
        yield path, field.attribute.metadata.get(METADATA)
        for inner in inner_tables(field.type):
            yield from _keys(inner, f"{path}.")


def _not_plain(value: Any, at: str) -> Iterator[str]:
    """Where a state tree holds anything but tensors, numbers, strings, lists and dicts."""
    import torch

    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                yield f"{at}: key {key!r} is no string"
            yield from _not_plain(inner, f"{at}.{key}")
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            yield from _not_plain(inner, f"{at}.{i}")
    elif not isinstance(value, torch.Tensor | bool | int | float | str | None):
        yield f"{at}: a {type(value).__name__}"


def _equal(a: Any, b: Any) -> bool:
    import torch

    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.equal(b)
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


@contextmanager
def _file(text: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="forge-conformance-") as folder:
        path = Path(folder) / "config.toml"
        path.write_text(text, encoding="utf-8")
        yield str(path)
