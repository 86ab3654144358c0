"""Reference and JSON Schema, both made from what tables declare."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
import tomli
from configkit import Catalog, load
from test_config_values import REFUSED

from forge_core.config import ConfigError
from forge_core.config.catalog import StaticCatalog
from forge_core.config.recipes import find_recipe, recipe_names
from forge_core.config.reference import reference, reference_text, sections
from forge_core.config.schema import json_schema
from forge_core.config.shape import fields_of
from forge_core.config.tables import CORE_TABLES
from forge_core.plugins import PluginCatalog
from forge_core.testing import isolated_plugins

CATALOG = Catalog()
NAMES = [name for name in CATALOG.table_names() if name != "broken"]
SCHEMA = json_schema(CATALOG, NAMES)
CHECK = jsonschema.Draft202012Validator(SCHEMA)


def valid(text: str) -> bool:
    return bool(CHECK.is_valid(tomli.loads(text)))


# Reference --------------------------------------------------------------------------------------------------


def test_every_key_of_the_core_is_in_the_reference_with_its_help() -> None:
    text, plain = reference(CATALOG), reference_text(CATALOG)
    for name, cls in CORE_TABLES.items():
        assert f"## `[{name}]`" in text
        for field in fields_of(cls).values():
            assert f"| `{field.name}` |" in text
            assert field.key.help.replace("|", "\\|") in text
            assert field.key.help in plain


def test_rows_of_the_reference() -> None:
    lines = reference(CATALOG, NAMES).splitlines()
    for line in (
        "| `width` | integer | `4` | > 0 | An integer. |",
        "| `pair` | list of number, number | `[0.1, 0.2]` | >= 0 and < 1 | Two numbers. |",
        '| `shape` | text | `"round"` | "round", "square" | A closed set. |',
        '| `finish` | text | `"paint"` | a finish: glue, none, paint | A component. |',
        "| `n_kv_heads` | integer | n_heads | > 0 | Key/value heads (GQA). |",
        "| `size` | integer | required | > 0 | How big it is. |",
        "| `seq_len` | integer (tokens) | `512` | > 0 | Tokens of a sequence. |",
        "| `inner` | table | a table |  | A table. |",
        "This table takes no keys.",
    ):
        assert line in lines
    headers = [line for line in lines if line.startswith("##")]
    for header in ("[[toys.items]]", "[toys.inner]", "[toys.named.NAME]", "[toys.glue]", '[toys."mine/saw"]',
                   "[model.rope_scaling]", "[[freeze.stages]]", "[optimizer.muon]"):  # fmt: skip
        assert f"## `{header}`" in headers


def test_names_of_parts_have_their_article() -> None:
    limits = [row.limits for section in sections(PluginCatalog(isolated_plugins())) for row in section.rows]
    assert any(text.startswith("an optimizer: ") for text in limits)
    assert any(text.startswith("a schedule: ") for text in limits)
    assert not any(re.match(r"a [aeiou]\w+: ", text) for text in limits)


def test_tables_of_markdown_have_five_columns() -> None:
    for line in reference(CATALOG, NAMES).splitlines():
        if line.startswith("|"):
            assert line.replace("\\|", "").count("|") == 6


def test_text_for_a_terminal() -> None:
    text = reference_text(CATALOG, ["strict"])
    assert (
        "[strict]\n  A plugin's table with a required key.\n"
        "  size  (integer; required; > 0)\n      How big it is." in text
    )


def test_a_broken_plugin_is_described_by_its_error() -> None:
    (section,) = sections(CATALOG, ["broken"])
    assert section.help == "plugin broken cannot be imported: no module named x"


def test_every_key_says_what_it_is_for() -> None:
    for section in sections(StaticCatalog()):
        assert section.help.endswith("."), section.header
        for row in section.rows:
            assert row.help.endswith("."), f"{section.header} {row.key}: {row.help}"


# Schema -----------------------------------------------------------------------------------------------------


def test_the_schema_is_a_schema_and_plain_json() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA


@pytest.mark.parametrize("name", recipe_names())
def test_recipes_are_valid(name: str) -> None:
    path = find_recipe(name)
    assert path is not None
    from forge_core.plugins import PluginCatalog, Plugins

    schema = json_schema(PluginCatalog(Plugins()))
    jsonschema.validate(tomli.loads(path.read_text()), schema, cls=jsonschema.Draft202012Validator)


def test_a_resolved_configuration_is_valid() -> None:
    config = load(
        "[toys]\nfinish = 'glue'\nglue.drying = 1\nlimit = 'none'\n[[toys.items]]\nstart = 1\n[plain]"
    )
    assert valid(config.to_toml())


@pytest.mark.parametrize(
    "text",
    [
        "extends = 'base.toml'\ntoys = false\nplain = true\nbroken = 3"[:-11],
        "extends = ['a.toml', 'quickstart']",
        "[toys]\nfinish = 'other/part'\n[toys.'other/part']\nanything = 1",
        "[optimizer]\nname = 'muon'\nbetas = [0.9, 0.95]\nlr = 1\n[optimizer.muon]\ndepth = 2",
        "[toys]\nextra = false\nnamed.x.depth = 1\nweights = [[1], [2, 3]]\nresume = true",
        "[model]\nvocab_size = 'none'",
    ],
)
def test_valid(text: str) -> None:
    assert valid(text)


@pytest.mark.parametrize(
    "text",
    [
        "lr = 1",
        "[nobody]",
        "train = false",
        "[optimizer]\nlearning_rate = 1",
        "[optimizer]\nname = 'adam'",
        "[optimizer]\nlr = 0",
        "[optimizer]\nbetas = [0.9]",
        "[optimizer]\nbetas = [0.9, 1.0]",
        "[optimizer.muon]\ndept = 2",
        "[optimizer.lion]\nx = 1",
        "[freeze]\nstages = [{start_stp = 3}]",
        "[freeze]\nstages = [{modules = ['x']}]",
        "[guard]\naction = 'panic'",
        "[train]\ncompile = 'true'",
        "[toys]\nmode = 'quick'",
        "[model.rope_scaling]\nfactr = 2.0",
        "[optimizer]\nno_decay = ['nrom']",
    ],
)
def test_invalid(text: str) -> None:
    assert not valid(text)
    with pytest.raises(ConfigError):
        load(text)


def test_schema_and_loader_agree_on_what_is_refused() -> None:
    """Except for what JSON Schema cannot say: whole floats for integers, and numbers that are not finite."""
    beyond: set[Any] = {("width", "1e3"), ("number", "nan"), ("number", "inf"), ("title", "2024-01-01")}
    for key, written, _ in REFUSED:
        if (key, written) not in beyond:
            assert not valid(f"[toys]\n{key} = {written}"), (key, written)


def test_descriptions_defaults_and_bounds() -> None:
    train = SCHEMA["properties"]["train"]["properties"]
    assert train["seq_len"] == {
        "type": "integer", "exclusiveMinimum": 0, "description": "Tokens of a sequence.", "default": 512,
    }  # fmt: skip
    kv = SCHEMA["properties"]["model"]["properties"]["n_kv_heads"]
    assert kv["description"] == "Key/value heads (GQA). Left out: n_heads."
