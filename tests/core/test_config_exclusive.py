"""Keys that stand instead of others: the later layer's way counts, and the other is dropped."""

from __future__ import annotations

from pathlib import Path

import pytest
from configkit import Catalog as Broken

from forge_core.config import Config, ConfigError, evolve, key, load_config, table
from forge_core.config.catalog import StaticCatalog
from forge_core.config.tables import DataConfig
from forge_core.plugins import PluginCatalog
from forge_core.testing import isolated_plugins

ONE = "[data]\nsource = 'jsonl'\npath = 'a.jsonl'\n"
MIX = "[[data.mix]]\nname = 'x'\nsource = 'text'\n[[data.mix]]\nname = 'y'\nsource = 'text'\n"


@table
class Ends:
    """Ways to end."""

    steps: int = key(0, help="Updates.")
    hours: float | None = key(None, help="Hours.", instead_of=("steps",))


@table
class Run:
    """A table in which one lies."""

    ends: Ends = key(factory=Ends, help="Ways to end.")


def read(folder: Path, *texts: str, flags: tuple[str, ...] = (), catalog: object = None) -> Config:
    """Files that extend each other, the first below all."""
    for number, text in enumerate(texts):
        above = f"extends = '{number - 1}.toml'\n" if number else ""
        (folder / f"{number}.toml").write_text(above + text)
    found = catalog or PluginCatalog(isolated_plugins())
    return load_config(
        folder / f"{len(texts) - 1}.toml",
        ["--model.vocab_size=300", *flags],
        catalog=found,  # type: ignore[arg-type]
    )


def said(config: Config) -> tuple[str, str | None, list[str]]:
    data = config[DataConfig]
    return data.source, data.path, [each.name for each in data.mix]


def test_a_later_mixture_replaces_one_source(tmp_path: Path) -> None:
    config = read(tmp_path, ONE, MIX)
    assert said(config) == ("text", None, ["x", "y"])
    assert config.origin("data.source") == config.origin("data.path") == "default"


def test_a_later_source_replaces_a_mixture(tmp_path: Path) -> None:
    config = read(tmp_path, MIX, ONE)
    assert said(config) == ("jsonl", "a.jsonl", [])
    assert config.origin("data.mix") == "default"
    flags = ("--data.source=jsonl", "--data.path=b.jsonl")
    assert said(read(tmp_path, MIX, flags=flags)) == ("jsonl", "b.jsonl", [])
    # the name of the default counts as well
    assert said(read(tmp_path, MIX, flags=("--data.source=text",))) == ("text", None, [])


def test_phases_of_a_mixture_that_is_replaced_are_for_the_later_layer_to_say(tmp_path: Path) -> None:
    """They may change the learning rate, too, which nobody has taken back."""
    phases = MIX + "[[data.phases]]\nstart_step = 5\nweights = {x = 1.0}\nlr_scale = 0.5\n"
    with pytest.raises(ConfigError, match=r"no mixture to weigh \(.*data\.phases = \[\]"):
        read(tmp_path, phases, ONE)
    assert not read(tmp_path, phases, ONE + "phases = []\n")[DataConfig].phases
    slower = ONE + "phases = [{start_step = 5, lr_scale = 0.5}]\n"
    assert read(tmp_path, phases, slower)[DataConfig].phases[0].lr_scale == 0.5


def test_of_three_layers_the_last_counts(tmp_path: Path) -> None:
    assert said(read(tmp_path, MIX, ONE, MIX.replace("'y'", "'z'"))) == ("text", None, ["x", "z"])
    assert said(read(tmp_path, ONE, MIX, "[data]\nsource = 'parquet'\npath = 'b'")) == ("parquet", "b", [])
    # the source of the first was gone when the third came
    assert said(read(tmp_path, ONE, MIX, "[data]\npath = 'b'")) == ("text", "b", [])


def test_one_layer_that_says_both_keeps_both(tmp_path: Path) -> None:
    """What does not go together is then reported by the plugin that reads the table."""
    assert said(read(tmp_path, ONE + MIX)) == ("jsonl", "a.jsonl", ["x", "y"])
    assert said(read(tmp_path, "", ONE + MIX, flags=("--data.mix.0.weight=2", "--data.mix.1.weight=1"))) == (
        "jsonl",
        "a.jsonl",
        ["x", "y"],
    )


def test_a_changed_item_is_no_new_mixture(tmp_path: Path) -> None:
    weights = ("--data.mix.0.weight=2", "--data.mix.1.weight=1")
    config = read(tmp_path, ONE, MIX, flags=weights)
    assert said(config) == ("text", None, ["x", "y"])
    assert [each.weight for each in config[DataConfig].mix] == [2, 1]


def test_an_empty_list_replaces_nothing(tmp_path: Path) -> None:
    assert said(read(tmp_path, ONE, "[data]\nmix = []")) == ("jsonl", "a.jsonl", [])
    assert said(read(tmp_path, MIX, "[data]\nmix = []\n" + ONE.split("\n", 1)[1])) == (
        "jsonl",
        "a.jsonl",
        [],
    )


def test_a_written_configuration_reads_as_itself(tmp_path: Path) -> None:
    for texts in ((ONE, MIX), (MIX, ONE)):
        config = read(tmp_path, *texts)
        written = config.to_toml()
        assert read(tmp_path, written) == config
        assert said(read(tmp_path, written, ONE)) == ("jsonl", "a.jsonl", [])
        assert said(read(tmp_path, written, MIX)) == ("text", None, ["x", "y"])


def test_tables_of_plugins_and_tables_in_them_may_say_so(tmp_path: Path) -> None:
    catalog = StaticCatalog({"mine": Run})
    steps, hours = "[mine.ends]\nsteps = 3\n", "[mine.ends]\nhours = 1.5\n"
    for texts, ends in {
        (steps, hours): Ends(hours=1.5),
        (hours, steps): Ends(steps=3),
        (steps + "hours = 1.5",): Ends(steps=3, hours=1.5),
    }.items():
        config = read(tmp_path, *texts, catalog=catalog)
        assert config.get("mine") == evolve(Run(), ends=ends)


def test_a_table_that_is_off_is_not_asked_for(tmp_path: Path) -> None:
    """The catalog's table `broken` raises where it is loaded."""
    lower, upper = "[broken]\na = 1\n[train]\nseed = 1", "[train]\nseed = 2"
    read(tmp_path, lower, upper, flags=("--broken=false",), catalog=Broken())
    with pytest.raises(ConfigError, match="broken"):
        read(tmp_path, lower, upper, catalog=Broken())
