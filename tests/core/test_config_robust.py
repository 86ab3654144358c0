"""Whatever a file or a command line holds: a configuration, or problems in words, never another exception."""

from __future__ import annotations

import random
from typing import Any

import pytest
from configkit import Catalog, load

from forge_core.config import Config, ConfigError, Problem
from forge_core.config.shape import fields_of, plain
from forge_core.config.writing import value

CATALOG = Catalog()
TABLES = [name for name in CATALOG.table_names() if name != "broken"]


PATHS = (
    "toys toys.width toys.items.0.start toys.items.1 toys.pair.0 toys.named.a.depth train.seed toys.inner "
    "toys.labels.x optimizer.name optimizer.muon.depth optimizer.betas.7 x x.y.0 toys.extra toys.finish.x "
    "toys.words.0.0 plain.x toys.'a-b' toys.mine/saw.depth"
)


def junk(draw: random.Random, depth: int = 0) -> Any:
    simple = [
        True,
        False,
        0,
        -1,
        3,
        10**20,
        1.5,
        -0.0,
        float("nan"),
        float("inf"),
        "",
        "none",
        "x",
        "a/b",
        "é\n\t",
    ]
    if depth > 2 or draw.random() < 0.6:
        return draw.choice(simple)
    if draw.random() < 0.5:
        return [junk(draw, depth + 1) for _ in range(draw.randint(0, 3))]
    return {draw.choice(["a", "0", "depth", "start", "x.y"]): junk(draw, depth + 1) for _ in range(2)}


def attempt(text: str, flags: list[str]) -> None:
    config: Config | None = None
    found: tuple[Problem, ...] = ()
    try:
        config = load(text, flags)
    except ConfigError as error:
        found = error.problems
    assert (config is None) == bool(found)
    for problem in found:
        assert "\n" not in str(problem)
        assert "object at 0x" not in str(problem)
    if config is not None:
        assert load(config.to_toml()) == config


@pytest.mark.parametrize("seed", range(40))
def test_junk_values_in_files(seed: int) -> None:
    draw = random.Random(seed)
    tree: dict[str, Any] = {}
    for name in draw.sample(TABLES, 4):
        keys = [
            *fields_of(CATALOG.table(name) or type(load().get("run"))),
            "paint",
            "glue",
            "mine/saw",
            "muon",
            "z",
        ]
        tree[name] = {key: junk(draw) for key in draw.sample(keys, min(len(keys), 3))}
    if draw.random() < 0.3:
        tree[draw.choice([*TABLES, "nobody"])] = junk(draw)
    attempt("\n".join(f'"{name}" = {value(inner)}' for name, inner in tree.items()), [])


@pytest.mark.parametrize("seed", range(40))
def test_junk_flags(seed: int) -> None:
    draw = random.Random(seed)
    paths = PATHS.split()
    texts = [
        "1",
        "true",
        "none",
        "[1,2]",
        "[a,b]",
        "{a=1}",
        "",
        "x",
        "1e400",
        "[[",
        "'",
        "\n",
        "{",
        "9" * 5000,
        "nan",
    ]
    flags = [f"--{draw.choice(paths)}={draw.choice(texts)}" for _ in range(4)]
    attempt(draw.choice(["", "[toys]\nwidth = 3", "toys = false", "[[toys.items]]\nstart = 1"]), flags)


def test_a_sound_configuration_as_junk_is_made_from() -> None:
    assert plain(load("[toys]").get("toys"))["width"] == 4
