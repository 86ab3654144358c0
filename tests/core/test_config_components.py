"""Components picked by name, and their options in sub-tables."""

from __future__ import annotations

import pickle

import pytest
from configkit import Catalog, GlueOptions, Inner, PaintOptions, ToysConfig, component, load, problems

from forge_core.config import table
from forge_core.config.fields import key
from forge_core.config.reference import sections
from forge_core.config.schema import json_schema
from forge_core.config.structure import Chosen


@table
class Entry:
    """One entry."""

    finish: str = key("paint", component="finish", help="A component.")


@table
class Mixed:
    """A table."""

    entries: list[Entry] = key(factory=list, help="Entries.")


@table
class WrapOptions:
    """A finish over another one."""

    under: str = key("paint", component="finish", help="A component.")
    parts: list[Entry] = key(factory=list, help="Entries, which pick from the same category.")


class Wrapping(Catalog):
    """Two components whose options pick from the category that they are of."""

    def __init__(self) -> None:
        super().__init__()
        for pair in (("finish", "wrap"), ("finish", "mine/veil")):
            self._components[pair] = component(*pair)
            self._options[pair] = WrapOptions


def test_a_component_may_be_made_of_others_of_its_category() -> None:
    """Whoever lists all keys does not follow it into itself."""
    catalog = Wrapping()
    text = "[toys]\nfinish = 'wrap'\n[toys.wrap]\nunder = 'none'"
    assert load(text, catalog=catalog).options("toys", "wrap") == WrapOptions(under="none")
    found = problems("[toys]\nfinish = 'wrap'\nundr = 1", catalog=catalog)
    assert found["toys.undr"].startswith("unknown key in [toys]")
    headers = [section.header for section in sections(catalog, ["toys"])]
    assert "[toys.wrap]" in headers
    assert "[toys.wrap.wrap]" not in headers
    wrapped = json_schema(catalog, ["toys"])["properties"]["toys"]["anyOf"][0]["properties"]["wrap"]
    assert wrapped["properties"]["wrap"] == {"type": "object"}
    assert wrapped["properties"]["under"]["default"] == "paint"


def test_options_of_the_chosen_component_have_defaults() -> None:
    config = load("[toys]")
    assert config[ToysConfig].finish == "paint"
    assert config.options("toys", "paint") == PaintOptions(coats=8)
    assert config.origin("toys.paint.coats") == "derived"
    assert config.options("toys", "none") is None
    assert config.options("optimizer", "lion") is None
    assert config.options("optimizer", "muon") == Inner()


def test_options_are_read_and_derived() -> None:
    config = load(
        "[toys]\nfinish = 'glue'\nglue.drying = 3\n[toys.paint]\ngloss = 1\n[optimizer.muon]\ndepth = 2"
    )
    assert config.options("toys", "glue") == GlueOptions(drying=3.0)
    assert config.options("toys", "paint") == PaintOptions(gloss=1.0, coats=8)
    assert config.options("optimizer", "muon") == Inner(depth=2)


def test_options_are_checked_even_when_another_is_chosen() -> None:
    found = problems(
        "[toys.glue]\ndrying = -1\n[toys.paint]\nglos = 1\n"
        "[optimizer.muon]\ndepth = -1\n[optimizer.lion]\nx = 1"
    )
    assert found == {
        "optimizer.muon.depth": "must be >= 0, not -1 ()",
        "optimizer.lion.x": "unknown key in [optimizer.lion] (it takes no keys)",
        "toys.glue.drying": "must be > 0, not -1.0 ()",
        "toys.paint.glos": "unknown key in [toys.paint] (did you mean gloss?)",
    }
    assert problems("[toys]\n[toys.glue]\ndrying = 200") == {"toys.glue.drying": "never dries ()"}


def test_required_options_of_the_chosen_component() -> None:
    assert problems("[toys]\nfinish = 'glue'") == {"toys.glue.drying": "is required (Hours.)"}


def test_unknown_components_are_answered_with_the_known_ones() -> None:
    found = problems("[toys]\nfinish = 'pant'\ntools = ['saw', 'axe']\n[optimizer]\nname = 'adam'")
    assert found["toys.finish"] == "there is no finish 'pant' (did you mean paint? known: glue, none, paint)"
    assert found["optimizer.name"].endswith("(did you mean adamw? known: adamw, lion, muon)")
    text = str(found)
    assert "there is no tool 'axe' (known: mine/saw)" in text or "there is no tool 'saw'" in text


def test_parts_of_other_plugins() -> None:
    config = load("[toys]\ntools = ['mine/saw']\n[toys.'mine/saw']\ndepth = 4")
    assert config.options("toys", "mine/saw") == Inner(depth=4)
    assert "did you mean mine/saw?" in problems("[toys]\ntools = ['saw']")["toys.tools"]
    assert "plugin broken cannot be imported" in problems("[toys]\ntools = ['broken/saw']")["toys.tools"]
    assert problems("[toys.'broken/saw']\nx = 1") == {
        'toys."broken/saw"': "plugin broken cannot be imported: no module named x (reinstall it)"
    }
    assert "there is no optimizer 'nobody/x'" in problems("[optimizer]\nname = 'nobody/x'")["optimizer.name"]
    assert "unknown key in [optimizer]" in problems("[optimizer.'nobody/x']\na = 1")['optimizer."nobody/x"']


def test_options_must_be_a_table() -> None:
    found = problems("[optimizer]\nmuon = 3")
    assert found["optimizer.muon"].startswith("expected a table with the options of this component")
    assert load("[optimizer]\nmuon = true").options("optimizer", "muon") == Inner()


def test_unknown_names_are_key_errors() -> None:
    config = load("[toys]")
    for path, name in (("toys", "axe"), ("nowhere", "paint"), ("train", "paint")):
        with pytest.raises(KeyError):
            config.options(path, name)


def test_chosen_lists_what_tables_pick() -> None:
    config = load("[toys]\ntools = ['mine/saw']")
    assert Chosen("toys", "finish", "finish", "paint") in config.chosen()
    assert config.chosen("tool") == (Chosen("toys", "tools", "tool", "mine/saw"),)
    assert [pick.name for pick in config.chosen("optimizer")] == ["adamw"]


def test_a_component_named_none_is_no_missing_value() -> None:
    @table
    class Picky:
        """A table."""

        finish: str | None = key(None, component="finish", help="A component.")

    class WithPicky(Catalog):
        def __init__(self) -> None:
            super().__init__()
            self._tables["picky"] = Picky

    assert load("[picky]\nfinish = 'none'", catalog=WithPicky()).get("picky").finish == "none"
    assert load("[picky]", catalog=WithPicky()).get("picky").finish is None


def test_components_picked_inside_items_of_an_array() -> None:
    class WithMixed(Catalog):
        def __init__(self) -> None:
            super().__init__()
            self._tables["mixed"] = Mixed

    text = "[toys]\n[[mixed.entries]]\nfinish = 'glue'\nglue.drying = 1\n[[mixed.entries]]\npaint.gloss = 0"
    config = load(text, catalog=WithMixed())
    assert config.options("mixed.entries.0", "glue") == GlueOptions(drying=1.0)
    assert config.options("mixed.entries.1", "paint") == PaintOptions(gloss=0.0, coats=8)
    assert load(config.to_toml(), catalog=WithMixed()) == config
    assert "mixed.entries.1.glue.drying" in problems(
        "[toys]\n[[mixed.entries]]\n[[mixed.entries]]\nfinish = 'glue'", catalog=WithMixed()
    )


def test_a_configuration_can_be_sent_to_another_process() -> None:
    config = load("[toys]\nfinish = 'glue'\nglue.drying = 3")
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.options("toys", "glue") == GlueOptions(drying=3.0)
    assert copy.options("optimizer", "adamw") is None
    assert copy.origin("model.n_kv_heads") == "derived"
    assert copy.to_toml() == config.to_toml()
