"""Recipes: found by name without importing their packages; each loads."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
from configkit import Catalog

from forge_core.config import load_config, recipes
from forge_core.config.recipes import find_recipe, recipe_names
from forge_core.errors import UsageError
from forge_core.plugins import PluginCatalog, Plugins


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package `someones_plugin` that fails when it is imported, with a folder of recipes."""
    package = tmp_path / "someones_plugin"
    (package / "cookbook").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "cookbook" / "tasty.toml").write_text("[train]\nseed = 9")
    monkeypatch.syspath_prepend(str(tmp_path))
    points = [
        EntryPoint("core", "forge_core.recipes", recipes.GROUP),
        EntryPoint("someone", "someones_plugin.cookbook", recipes.GROUP),
        EntryPoint("gone", "no_such_package.recipes", recipes.GROUP),
    ]
    monkeypatch.setattr(recipes, "entry_points", lambda group: EntryPoints(points))
    recipes._recipes.cache_clear()
    yield package / "cookbook"
    recipes._recipes.cache_clear()


def test_recipes_of_plugins_are_found_without_importing_them(folder: Path) -> None:
    assert {"quickstart", "tasty"} <= set(recipe_names())
    assert find_recipe("tasty") == folder / "tasty.toml"
    assert find_recipe("nothing") is None
    config = load_config("tasty", ["--model.vocab_size=300"], catalog=Catalog())
    assert config.get("train").seed == 9
    assert config.origin("train.seed") == "recipe tasty"
    assert "someones_plugin" not in sys.modules


def test_two_recipes_of_one_name_are_an_error(folder: Path) -> None:
    (folder / "quickstart.toml").write_text("")
    with pytest.raises(UsageError, match="2 packages ship a recipe called 'quickstart'") as caught:
        find_recipe("quickstart")
    assert str(folder / "quickstart.toml") in caught.value.hint
    assert "tasty" in recipe_names()


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_loads(name: str) -> None:
    config = load_config(name, ["--model.vocab_size=300"], catalog=PluginCatalog(Plugins()))
    assert config.get("train").max_steps > 0
