"""Flags: the value is read by the type of the key, the last one wins, a stray token is an error."""

from __future__ import annotations

from typing import Any

import pytest
from configkit import Catalog, Inner, Item, ToysConfig, load, problems

from forge_core.config import ConfigError, load_config
from forge_core.config.tables import FreezeConfig, FreezeStage, OptimizerConfig
from forge_core.errors import UsageError


def toys(*flags: str, text: str = "[toys]") -> ToysConfig:
    return load(text, flags)[ToysConfig]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e5", "1e5"),
        ("true", "true"),
        ("[a]", "[a]"),
        ("'x'", "'x'"),
        ("", ""),
        ("a=b", "a=b"),
        ("1", "1"),
        ("é", "é"),
    ],
)
def test_text_stays_text(text: str, value: str) -> None:
    assert toys(f"--toys.title={text}").title == value
    assert toys(f"--toys.note={text}").note == value


@pytest.mark.parametrize(
    ("flag", "value"),
    [("true", True), ("false", False), ("True", True), ("False", False), (None, True)],
)
def test_booleans(flag: str | None, value: bool) -> None:
    assert toys("--toys.flag" if flag is None else f"--toys.flag={flag}").flag is value


@pytest.mark.parametrize("text", ["maybe", "1", "yes", "TRUE", "", "on"])
def test_not_a_boolean(text: str) -> None:
    assert "expected true or false" in problems("[toys]", [f"--toys.flag={text}"])["toys.flag"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[jsonl,tensorboard]", ["jsonl", "tensorboard"]),
        ("[ jsonl , tensorboard ]", ["jsonl", "tensorboard"]),
        ('["jsonl", "a,b"]', ["jsonl", "a,b"]),
        ("['jsonl',tensorboard]", ["jsonl", "tensorboard"]),
        ("jsonl", ["jsonl"]),
        ("jsonl,tensorboard", ["jsonl", "tensorboard"]),
        ("layers.[0-3].*", ["layers.[0-3].*"]),
        ("[1e5]", ["1e5"]),
        ("5", ["5"]),
        ("true", ["true"]),
        ("[]", []),
        ("", []),
    ],
)
def test_lists_of_words(text: str, value: list[str]) -> None:
    assert toys(f"--toys.words={text}").words == value


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("resume", "auto", "auto"),
        ("resume", "false", False),
        ("resume", "5", "5"),
        ("resume", "runs/x", "runs/x"),
        ("amount", "3", 3),
        ("amount", "3.5", 3.5),
        ("mode", "fast", "fast"),
        ("labels", "{a = 1}", {"a": 1}),
        ("inner", "{depth = 2}", Inner(depth=2)),
        ("many", "[4]", (4,)),
    ],
)
def test_other_types(key: str, text: str, value: Any) -> None:
    read = getattr(toys(f"--toys.{key}={text}"), key)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        ("width", "abc", 'expected an integer, not "abc" ()'),
        ("width", "1e3", "write 1000"),
        ("width", "2.9", "expected an integer, not 2.9"),
        ("width", '"5"', "drop the quotes"),
        ("number", "nan", "finite"),
        ("number", "-1.5", "must be >= -1"),
        ("number", ".5", 'expected a number, not ".5"'),
        ("pair", "0.9,0.95", "expected a list of 2"),
    ],
)
def test_a_flag_that_does_not_fit_is_named(key: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        toys(f"--toys.{key}={text}")
    (problem,) = caught.value.problems
    assert problem.origin == f"--toys.{key}={text}"
    assert message in f"{problem.message} ({problem.hint})"


def test_the_last_flag_wins_and_flags_do_not_stick_to_the_file() -> None:
    given = toys(
        "--toys.width=5", "--toys.width=6", "--toys.flag", "--toys.flag=false", text="[toys]\nwidth = 3"
    )
    assert (given.width, given.flag) == (6, False)
    assert problems("[toys]", ["--toys.width=6", "--toys.width=0"]) == {"toys.width": "must be > 0, not 0 ()"}
    assert toys("--toys.width=0", "--toys.width=6").width == 6


def test_nested_tables_and_tables_by_name() -> None:
    given = toys(
        "--toys.inner.depth=9", "--toys.labels.x=1", "--toys.named.a.depth=2", text="[toys.labels]\ny = 2"
    )
    assert given.inner == Inner(depth=9)
    assert given.labels == {"x": 1, "y": 2}
    assert given.named == {"a": Inner(depth=2)}
    quoted = toys('--toys.labels."a.b"=3', "--toys.labels.'c d'=4")
    assert quoted.labels == {"a.b": 3, "c d": 4}


def test_items_of_lists() -> None:
    text = "[[toys.items]]\nstart = 1\nweight = 2.0\n[[toys.items]]\nstart = 3"
    given = toys("--toys.items.1.weight=7", "--toys.items.2.start=8", text=text)
    assert given.items == [Item(start=1, weight=2.0), Item(start=3, weight=7.0), Item(start=8)]
    assert toys("--toys.pair.1=0.5").pair == (0.1, 0.5)
    assert toys("--toys.words.0=z").words == ["z", "b"]
    assert toys("--toys.words.2=c").words == ["a", "b", "c"]
    assert load("", ["--optimizer.betas.0=0.8"])[OptimizerConfig].betas == (0.8, 0.95)
    stages = load("", ["--freeze.stages.0.start_step=5", "--freeze.stages.0.modules=[x]"])[
        FreezeConfig
    ].stages
    assert stages == [FreezeStage(start_step=5, modules=["x"])]


def test_an_index_out_of_reach() -> None:
    found = problems("", ["--freeze.stages.3.start_step=5", "--toys.words.x=1"])
    assert found["freeze.stages.3.start_step"] == "3 is no index of a list of 0 (count from 0) ()"
    assert found["toys.words"] == "expected list of text, not a table ()"


def test_a_flag_through_a_value() -> None:
    assert "seed is already a value" in problems("[train]\nseed = 3", ["--train.seed.x=1"])["train.seed.x"]
    assert "expected an integer, not a table" in problems("", ["--train.seed.x=1"])["train.seed"]


def test_a_value_is_missing() -> None:
    assert problems("", ["--train.seq_len"]) == {
        "train.seq_len": "this flag needs a value (write --train.seq_len=VALUE)"
    }


@pytest.mark.parametrize(
    ("tokens", "message", "hint"),
    [
        (["foo"], "'foo' is not a flag", "--table.key=value"),
        (["-x=1"], "'-x=1' is not a flag", "--table.key=value"),
        (["--"], "'--' is not a flag", "--table.key=value"),
        (["--train.seed", "5"], "'5' is not a flag", "write --train.seed=5"),
        (["--train.compile", "true"], "'true' is not a flag", "write --train.compile=true"),
        (["train.seed=5"], "'train.seed=5' is not a flag", "--table.key=value"),
        (["a", "--train.seed=1", "b"], "'a', 'b' are not flags", "--table.key=value"),
        (["--train..seed=1"], "'--train..seed=1' is not a flag", "--table.key=value"),
        (["--=1"], "'--=1' is not a flag", "--table.key=value"),
        (["--run.name=\udcff"], "is not a flag", "--table.key=value"),
    ],
)
def test_stray_tokens(tokens: list[str], message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        load_config("no-such-file.toml", tokens, catalog=Catalog())
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_status == 2
    str(caught.value).encode()


def test_a_flag_asks_for_a_plugin_table() -> None:
    assert load("", ["--toys.width=8"])[ToysConfig].width == 8
    assert load("", ["--toys"])[ToysConfig] == ToysConfig()


def test_a_flag_may_pick_a_component_and_give_its_options() -> None:
    config = load("[toys]", ["--toys.finish=glue", "--toys.glue.drying=2"])
    assert config.options("toys", "glue").drying == 2.0
    assert config.options("optimizer", "muon") == Inner()
    assert (
        load("", ["--optimizer.name=muon", "--optimizer.muon.depth=3"]).options("optimizer", "muon").depth
        == 3
    )
    assert (
        load("[toys]", ["--toys.tools=[mine/saw]", '--toys."mine/saw".depth=3'])
        .options("toys", "mine/saw")
        .depth
        == 3
    )
    assert (
        load("[toys]", ["--toys.tools=mine/saw", "--toys.mine/saw.depth=3"]).options("toys", "mine/saw").depth
        == 3
    )
