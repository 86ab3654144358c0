"""A catalog with tables that try every kind of key, for the tests of the configuration layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from forge_core.config import Config, ConfigError, Problem, evolve, key, load_config, table
from forge_core.config.catalog import StaticCatalog
from forge_core.contract import Component
from forge_core.errors import PluginError


@table
class Inner:
    """A table in a table."""

    depth: int = key(1, ge=0, help="A number.")
    names: list[str] = key(factory=list, help="Words.")


@table
class Item:
    """One of several."""

    start: int = key(ge=1, help="Required.")
    weight: float = key(1.0, gt=0, help="A weight.")


@table
class PaintOptions:
    """Options of paint."""

    gloss: float = key(0.5, ge=0, le=1, help="Shine.")
    coats: int | None = key(None, gt=0, help="Layers.", derived="twice the width")

    def resolve(self, config: Config) -> PaintOptions:
        return self if self.coats is not None else evolve(self, coats=2 * config.get("toys").width)


@table
class GlueOptions:
    """Options of glue; one is required."""

    drying: float = key(gt=0, help="Hours.")

    def problems(self) -> Iterator[Problem]:
        if self.drying > 100:
            yield Problem("drying", "never dries")


@table
class ToysConfig:
    """A plugin's table with every kind of key."""

    number: float = key(1.0, ge=-1, help="A number.")
    width: int = key(4, gt=0, help="An integer.")
    title: str = key("toy", help="Text.")
    flag: bool = key(False, help="True or false.")
    pair: tuple[float, float] = key((0.1, 0.2), ge=0, lt=1, help="Two numbers.")
    many: tuple[int, ...] = key((), help="Any number of integers.")
    weights: list[list[int]] = key(factory=list, help="Nested.")
    words: list[str] = key(factory=lambda: ["a", "b"], help="Words.")
    limit: int | None = key(10, help="May be none.")
    note: str | None = key(None, help="May be none.")
    resume: str | bool = key("auto", help="Text or a boolean.")
    amount: int | float = key(1, help="Either.")
    mode: Literal["slow", "fast"] = key("slow", help="A closed set.")
    shape: str = key("round", choices=("round", "square"), help="A closed set.")
    labels: dict[str, int] = key(factory=dict, help="By name.")
    inner: Inner = key(factory=lambda: Inner(depth=7), help="A table.")
    extra: Inner | None = key(None, help="A table that may be missing.")
    items: list[Item] = key(factory=list, help="Tables.")
    named: dict[str, Inner] = key(factory=dict, help="Tables by name.")
    finish: str = key("paint", component="finish", help="A component.")
    tools: list[str] = key(factory=list, component="tool", help="Components.")
    path: Path | None = key(None, help="A path.")


@table
class StrictConfig:
    """A plugin's table with a required key."""

    size: int = key(gt=0, help="How big it is.")
    crate: int = key(1, ge=1, help="A key that only this table has.")


def component(category: str, name: str, options: bool = True) -> Component:
    return Component(
        category=category, name=name, target="none:none", options="none:None" if options else None
    )


class Catalog(StaticCatalog):
    """The core's tables and plugins: [toys], [strict], [plain] (no keys); [broken] cannot be loaded."""

    loaded: list[str]

    def __init__(self) -> None:
        options: dict[tuple[str, str], type] = {
            ("finish", "paint"): PaintOptions,
            ("finish", "glue"): GlueOptions,
            ("tool", "mine/saw"): Inner,
            ("optimizer", "muon"): Inner,
        }
        parts = [component(*pair) for pair in options]
        parts += [component("finish", "none", options=False), component("optimizer", "lion", options=False)]
        tables = {"toys": ToysConfig, "strict": StrictConfig, "plain": None, "broken": None}
        super().__init__(tables, parts, options)
        self.loaded = []

    def table(self, name: str) -> type | None:
        self.loaded.append(name)
        if name == "broken":
            raise PluginError("plugin broken cannot be imported: no module named x", "reinstall it")
        return super().table(name)

    def component(self, category: str, name: str) -> Component:
        if name.startswith("broken/"):
            raise PluginError("plugin broken cannot be imported: no module named x", "reinstall it")
        return super().component(category, name)


def load(text: str = "", flags: Sequence[str] = (), *, folder: Path | None = None, **options: Any) -> Config:
    """Load TOML text (from a file in `folder`, if given) with a vocabulary that needs no tokenizer."""
    options.setdefault("catalog", Catalog())
    flags = ["--model.vocab_size=300", *flags]
    if folder is None:
        return _from_text(text, flags, options)
    path = folder / "run.toml"
    path.write_text(text)
    return load_config(path, flags, **options)


def _from_text(text: str, flags: Sequence[str], options: dict[str, Any]) -> Config:
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_text(text)
        return load_config(path, flags, **options)


def problems(text: str = "", flags: Sequence[str] = (), **options: Any) -> dict[str, str]:
    """The problems of a configuration, path -> message and hint; the test fails if there are none."""
    with pytest.raises(ConfigError) as caught:
        load(text, flags, **options)
    return {p.path: f"{p.message} ({p.hint})" for p in caught.value.problems}


def only(found: Iterable[Problem]) -> Problem:
    (one,) = found
    return one
