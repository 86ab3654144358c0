"""The resolved configuration as TOML: origins as comments, and loading it gives the same configuration."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import tomli
from configkit import Catalog, Inner, Item, ToysConfig, load

from forge_core.config import Config, evolve, load_config
from forge_core.config.tables import CORE_TABLES
from forge_core.config.writing import value

EVERYTHING = r"""
[run]
choose = {step_fn = "toys"}
[optimizer]
name = "muon"
groups = [{modules = "x", lr_scale = 0}]
[freeze]
modules = ["x"]
stages = [{start_step = 1, modules = ["y"]}, {start_step = 2}]
[plain]
[toys]
title = "a \"quoted\"\n\ttext \u007f é \\ '"
limit = "none"
labels = {a = 1, "b c" = 2}
weights = [[1, 2], []]
resume = false
amount = 2.5
path = "a/b"
extra.depth = 3
named.x.depth = 2
named.1.depth = 4
finish = "glue"
tools = ["mine/saw"]
[[toys.items]]
start = 1
[[toys.items]]
start = 2
weight = 0.5
[toys.glue]
drying = 1e-30
[toys."mine/saw"]
names = ["n"]
"""


def again(config: Config, *flags: str, folder: Path) -> Config:
    path = folder / "config.toml"
    path.write_text(config.to_toml(), encoding="utf-8")
    return load_config(path, flags, catalog=Catalog())


def test_every_value_has_its_origin(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text("[optimizer]\nlr = 1e-3")
    config = load("extends = 'base.toml'\n[train]\nseq_len = 64", ["--train.seed=7"], folder=tmp_path)
    lines = config.to_toml().splitlines()
    assert f"lr = 0.001  # {tmp_path / 'base.toml'}" in lines
    assert f"seq_len = 64  # {tmp_path / 'run.toml'}" in lines
    assert "seed = 7  # --train.seed=7" in lines
    assert "n_kv_heads = 8  # derived" in lines
    assert "max_steps = 1000  # default" in lines
    assert "# name is not set: a fresh name from the date, which never resumes" in lines
    keys = [line for line in lines if " = " in line and not line.startswith(("#", "derived"))]
    assert len(keys) > 60
    assert all("  # " in line for line in keys)


def test_tables_stand_in_order_and_hold_what_was_resolved() -> None:
    config = load("[toys]\n[strict]\nsize = 2")
    read = tomli.loads(config.to_toml())
    names = [name for name in read if isinstance(read[name], dict)]
    assert names == [*list(load())[: len(CORE_TABLES)], "strict", "toys"]
    assert read["model"]["n_kv_heads"] == 8
    assert read["model"]["max_seq_len"] == 512
    assert "model.max_seq_len" in read["derived"]
    assert read["toys"]["paint"] == {"gloss": 0.5, "coats": 8}


def test_loading_it_reproduces_the_configuration(tmp_path: Path) -> None:
    config = load(EVERYTHING)
    copy = again(config, folder=tmp_path)
    assert copy == config
    assert again(copy, folder=tmp_path).to_toml() == copy.to_toml()
    assert copy.options("toys", "glue").drying == 1e-30


def test_explicit_false_zero_empty_and_none_survive(tmp_path: Path) -> None:
    flags = [
        "--toys.flag=false",
        "--toys.limit=none",
        "--toys.words=[]",
        "--eval.interval=0",
        "--toys.title=",
    ]
    config = load("[toys]\nflag = true\nwords = ['a']\n[eval]\ninterval = 5", flags)
    copy = again(config, folder=tmp_path)
    toys = copy[ToysConfig]
    assert (toys.flag, toys.limit, toys.words, toys.title) == (False, None, [], "")
    assert copy.get("eval").interval == 0
    assert copy == config


def test_a_table_turned_off_against_its_default_stays_off(tmp_path: Path) -> None:
    config = load("[toys]")
    with_extra = config.replace(toys=evolve(config[ToysConfig], extra=Inner(depth=2)))
    assert again(with_extra, folder=tmp_path) == with_extra
    assert again(config, "--toys.extra=true", folder=tmp_path)[ToysConfig].extra == Inner()


def test_derived_values_follow_when_a_saved_configuration_is_changed(tmp_path: Path) -> None:
    config = load("[model]\ndim = 256\nn_heads = 8\n[train]\nseq_len = 64\n[toys]")
    changed = again(config, "--model.dim=512", "--train.seq_len=128", "--toys.width=6", folder=tmp_path)
    assert changed.get("model").head_dim == 64
    assert changed.get("model").ffn_hidden_dim == 1536
    assert changed.get("model").max_seq_len == 128
    assert changed.options("toys", "paint").coats == 12


def test_a_derived_list_that_is_none(tmp_path: Path) -> None:
    from forge_core.config import ConfigError

    for bad in ("derived = 3", "derived = ['a..b']"):
        with pytest.raises(ConfigError, match="derived: "):
            load(bad)
    assert load("derived = ['nowhere.x', 'train.seed.y']") == load()


@pytest.mark.parametrize(
    "item",
    ["", "a", "'", '"', "\\", "\n\r\t\b\f", "\x00\x1f\x7f", "é 中 \U0001f600",
     True, False, 0, -1, 10**30, 0.1,
     1e-300, 1e300, -0.0, [], [[1], []], {"a b": [1.5]}, {"x": {"y": "z"}}],
)  # fmt: skip
def test_values_survive(item: Any) -> None:
    read = tomli.loads(f"x = {value(item)}")["x"]
    assert read == item
    assert type(read) is type(item)


def test_a_long_or_odd_flag_stays_in_its_comment(tmp_path: Path) -> None:
    config = load("[toys]", ["--toys.title=" + "x" * 500 + "\n[train]\nseed = 3"])
    assert again(config, folder=tmp_path) == config


@pytest.mark.parametrize("seed", range(30))
def test_any_configuration_survives(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    config = load("[toys]")
    toys = evolve(
        config[ToysConfig],
        number=draw.choice([0.0, draw.random(), 10.0 ** draw.randint(-300, 300)]),
        title="".join(chr(draw.choice([draw.randint(0, 127), draw.randint(128, 0xD7FF)])) for _ in range(8)),
        limit=draw.choice([None, 0, 10, 11]),
        note=draw.choice([None, "", "true", "#", "1"]),
        resume=draw.choice(["auto", "true", True, False]),
        many=tuple(draw.randint(-9, 9) for _ in range(draw.randint(0, 3))),
        labels={f"k {i}.{draw.random()}": i for i in range(draw.randint(0, 3))},
        inner=Inner(depth=draw.randint(0, 9), names=[repr(draw.random())] * draw.randint(0, 2)),
        extra=draw.choice([None, Inner(), Inner(depth=5)]),
        items=[Item(start=i + 1, weight=draw.random() + 0.1) for i in range(draw.randint(0, 3))],
        named={f"n{i}": Inner(depth=i) for i in range(draw.randint(0, 2))},
    )
    changed = config.replace(toys=toys)
    assert again(changed, folder=tmp_path) == changed
