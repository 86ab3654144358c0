"""A typo in any key of any recipe that is installed is refused, and the right key suggested."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli
from typokit import places, sweep, typos

from forge_core.config.recipes import find_recipe, recipe_names
from forge_core.plugins import PluginCatalog, Plugins


@pytest.mark.slow
@pytest.mark.timeout(600)  # a few thousand configurations
def test_a_typo_in_any_key_of_a_recipe(tmp_path: Path) -> None:
    catalog = PluginCatalog(Plugins())
    for name in recipe_names():
        path = find_recipe(name)
        assert path is not None
        tree = tomli.loads(path.read_text())
        tree.setdefault("model", {})["vocab_size"] = 300
        found = sweep(tmp_path / "run.toml", catalog, tree, lambda word: sorted(set(typos(word))))
        tried, helped, missed = found
        print(f"{name}: {tried} typos, suggested in {100 * helped / tried:.1f} %; missed {missed[:5]}")
        assert tried > 4 * len(set(places(tree)))
        assert helped >= 0.95 * tried, missed
