"""Layers: defaults < extends < file < flags; what cannot be read; where each value came from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from configkit import Catalog, Item, StrictConfig, ToysConfig, load, only, problems

from forge_core.config import Config, ConfigError, load_config
from forge_core.config.tables import OptimizerConfig, TrainConfig

VOCAB = "--model.vocab_size=300"


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def read(path: Path | str, *flags: str) -> Config:
    return load_config(path, [VOCAB, *flags], catalog=Catalog())


def failure(path: Path | str, *flags: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(path, *flags)
    return str(only(caught.value.problems))


# Order ------------------------------------------------------------------------------------------------------


def test_defaults_extends_file_flags(tmp_path: Path) -> None:
    write(tmp_path, "base.toml", "[train]\nseq_len = 1\nbatch_size = 2\nmax_steps = 3\n[optimizer]\nlr = 1")
    path = write(tmp_path, "run.toml", 'extends = "base.toml"\n[train]\nbatch_size = 20\nmax_steps = 30')
    config = read(path, "--train.max_steps=300")
    train = config[TrainConfig]
    assert (train.seed, train.seq_len, train.batch_size, train.max_steps) == (42, 1, 20, 300)
    assert config[OptimizerConfig].lr == 1.0
    assert config.origin("train.seed") == "default"
    assert config.origin("train.seq_len") == str(tmp_path / "base.toml")
    assert config.origin("train.batch_size") == str(path)
    assert config.origin("train.max_steps") == "--train.max_steps=300"


def test_false_zero_and_empty_win_over_the_file(tmp_path: Path) -> None:
    text = (
        "[train]\ncompile = true\n[eval]\ninterval = 5\n[freeze]\nmodules = ['a', 'b']\n[toys]\nflag = true"
    )
    flags = ["--train.compile=false", "--toys.flag=False", "--eval.interval=0", "--freeze.modules=[]"]
    config = load(text, flags, folder=tmp_path)
    seen = (config.get("train").compile, config.get("toys").flag, config.get("eval").interval)
    assert seen == (False, False, 0)
    assert config.get("freeze").modules == []
    assert "expected true or false" in problems(text, ["--toys.flag=maybe"])["toys.flag"]
    saved = tmp_path / "saved.toml"
    saved.write_text(config.to_toml())
    assert load_config(saved, catalog=Catalog()) == config


def test_tables_merge_deep_and_arrays_replace_whole(tmp_path: Path) -> None:
    write(
        tmp_path,
        "a.toml",
        "[toys]\nitems = [{start = 1}, {start = 2}]\nwords = ['x', 'y']\nlabels = {a = 1}\n"
        "[toys.inner]\ndepth = 3\nnames = ['n']",
    )
    path = write(
        tmp_path,
        "b.toml",
        "extends = 'a.toml'\n[toys]\nitems = [{start = 9}]\nwords = ['z']\n"
        "labels = {b = 2}\n[toys.inner]\ndepth = 4",
    )
    toys = read(path)[ToysConfig]
    assert toys.items == [Item(start=9)]
    assert toys.words == ["z"]
    assert toys.labels == {"a": 1, "b": 2}
    assert (toys.inner.depth, toys.inner.names) == (4, ["n"])


def test_a_file_may_be_valid_only_with_its_flags(tmp_path: Path) -> None:
    path = write(tmp_path, "run.toml", "[strict]\n[model]\ndim = 96\nn_heads = 5")
    config = read(path, "--strict.size=2", "--model.n_heads=4")
    assert config[StrictConfig].size == 2


def test_extends_takes_lists_recipes_and_other_folders(tmp_path: Path) -> None:
    write(tmp_path, "low/one.toml", "extends = '../two.toml'\n[train]\nseed = 1\nseq_len = 11")
    write(tmp_path, "two.toml", "[train]\nseed = 2\nbatch_size = 22")
    write(tmp_path, "three.toml", "extends = 'two.toml'\n[train]\nseed = 3")
    path = write(tmp_path, "run.toml", "extends = ['quickstart', 'low/one.toml', 'three.toml']")
    config = read(path)
    train = config[TrainConfig]
    assert (train.seed, train.seq_len, train.batch_size) == (3, 11, 22)
    assert config[OptimizerConfig].lr == 3e-3
    assert config.origin("optimizer.lr") == "recipe quickstart"


def test_extends_in_a_circle(tmp_path: Path) -> None:
    path = write(tmp_path, "a.toml", "extends = 'b.toml'")
    write(tmp_path, "b.toml", "extends = 'a.toml'")
    message = failure(path)
    assert "extends: goes in a circle: " in message
    assert "a.toml -> " in message
    assert "b.toml: extends" in message
    assert "goes in a circle" in failure(write(tmp_path, "self.toml", "extends = ['self.toml']"))


@pytest.mark.parametrize("value", ["3", "[1]", "''", "{a = 1}"])
def test_extends_of_another_type(tmp_path: Path, value: str) -> None:
    assert "extends: expected a path" in failure(write(tmp_path, "a.toml", f"extends = {value}"))


def test_every_file_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    write(tmp_path, "bad.toml", "x = ")
    path = write(tmp_path, "run.toml", "extends = ['bad.toml', 'mising.toml', 'quikstart']")
    write(tmp_path, "missing.toml", "")
    with pytest.raises(ConfigError) as caught:
        read(path)
    text = str(caught.value)
    assert len(caught.value.problems) == 3
    assert "did you mean" in text
    assert "missing.toml" in text
    assert "did you mean quickstart?" in text


# Turning tables on and off ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "there"), [("", False), ("[toys]", True), ("toys = true", True), ("toys = false", False)]
)
def test_a_plugin_table_is_there_if_asked_for(text: str, there: bool) -> None:
    config = load(text)
    assert ("toys" in config) is there
    assert config.plugins == (("toys",) if there else ())
    if not there:
        with pytest.raises(KeyError):
            config[ToysConfig]
        with pytest.raises(KeyError):
            config.get("toys")


def test_false_removes_an_inherited_table_and_true_keeps_it(tmp_path: Path) -> None:
    write(tmp_path, "base.toml", "[toys]\nwidth = 9")
    off = write(tmp_path, "off.toml", "extends = 'base.toml'\ntoys = false")
    assert "toys" not in read(off)
    on = write(tmp_path, "on.toml", "extends = 'base.toml'\ntoys = true")
    assert read(on)[ToysConfig].width == 9
    again = write(tmp_path, "again.toml", "extends = 'off.toml'\n[toys]\ntitle = 'new'")
    assert read(again)[ToysConfig].width == 4
    assert "toys" not in read(on, "--toys=false")
    assert read(off, "--toys")[ToysConfig].width == 4
    assert read(off, "--toys=true", "--toys.width=5")[ToysConfig].width == 5
    assert "toys" not in read(off, "--toys.width=5", "--toys=false")
    assert read(on, "--toys=false", "--toys.title=x")[ToysConfig] == ToysConfig(title="x")


def test_a_table_that_is_turned_off_is_never_loaded(tmp_path: Path) -> None:
    write(tmp_path, "base.toml", "[broken]\nx = 1\n[toys]")
    path = write(tmp_path, "run.toml", "extends = 'base.toml'\nbroken = false")
    for flags in (["--toys=false"], ["--toys=false", "--strict.size=3", "--strict=false"]):
        catalog = Catalog()
        load_config(path, [VOCAB, *flags], catalog=catalog)
        assert not {"toys", "strict", "broken"} & set(catalog.loaded)


def test_a_table_without_keys() -> None:
    assert "plain" in load("plain = true")
    assert "unknown key in [plain] (it takes no keys)" in problems("[plain]\nx = 1")["plain.x"]


def test_core_tables_are_always_there() -> None:
    assert load().get("guard").max_consecutive == 10
    assert "cannot be turned off" in problems("train = false")["train"]


def test_a_broken_plugin_is_named() -> None:
    assert problems("[broken]") == {
        "broken": "plugin broken cannot be imported: no module named x (reinstall it)"
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train = 3", "expected a table, not 3 (write [train] and its keys below)"),
        ("[[train]]\nseed = 1", "expected a table, not [a table] (write [train], not [[train]])"),
        ("toys = 'x'", 'expected a table, not "x"'),
    ],
)
def test_a_table_that_is_no_table(text: str, message: str) -> None:
    assert message in next(iter(problems(text).values()))


# Files that cannot be read ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("[train]\nseed = ", ":2", "TOML syntax: invalid value"),
        ("[train]\nseed 3", ":2:6", "TOML syntax: expected '=' after a key in a key/value pair"),
        ("[optimizer]\n\nname = adamw", ":3:8", "text needs quotes"),
        ("[train]\nseed = 1\nseed = 2", ":3", "the key or table is there twice"),
        ("[train]\n[train]", ":2", "the key or table is there twice"),
        ('[run]\nname = "x', ":2", "TOML syntax: unterminated string"),
        ("x = " + "[" * 5000, "", "TOML syntax: "),
    ],
)
def test_toml_syntax(tmp_path: Path, text: str, where: str, message: str) -> None:
    path = write(tmp_path, "run.toml", text)
    found = failure(path, "--train.seed=x")
    assert found.startswith(f"{path}{where}")
    assert message in found
    assert "\n" not in found


def test_missing_file_suggests_a_near_one(tmp_path: Path) -> None:
    write(tmp_path, "small.toml", "")
    assert f"no such file (did you mean {tmp_path / 'small.toml'}?)" in failure(tmp_path / "smal.toml")
    assert f"there is no folder {tmp_path / 'no'}" in failure(tmp_path / "no" / "x.toml")
    assert "did you mean recipe quickstart?" in failure(f"{tmp_path}/quikstart.toml")


def test_a_bare_word_is_a_recipe_first() -> None:
    assert load_config("quickstart", [VOCAB], catalog=Catalog()).get("model").dim == 128
    assert "no recipe or file is called 'quikstart' (did you mean quickstart?)" in failure("quikstart")
    assert "recipes: " in failure("zzzzzz")


def test_a_file_without_suffix_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "mine", "[train]\nseed = 7")
    monkeypatch.chdir(tmp_path)
    assert read("mine").get("train").seed == 7


def test_a_folder_is_not_a_file(tmp_path: Path) -> None:
    assert "is a folder, not a configuration file" in failure(tmp_path)
    write(tmp_path, "config.toml", "")
    assert f"did you mean {tmp_path / 'config.toml'}?" in failure(tmp_path)


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"[run]\nname = '\xe9'\n")
    assert failure(path) == f"{path}:2: is not UTF-8 text (byte 0xe9) (save it as UTF-8)"


def test_a_byte_order_mark_and_crlf_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf[train]\r\nseed = 3\r\n")
    assert read(path).get("train").seed == 3


def test_a_path_that_no_system_takes() -> None:
    assert "cannot be read" in failure("a\0b.toml")
    assert "cannot be read: File name too long" in failure("x" * 5000 + ".toml")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs users")
def test_unreadable_for_a_user_that_is_not_root(tmp_path: Path) -> None:
    path = write(tmp_path, "run.toml", "")
    path.chmod(0)
    code = (
        "import os, sys\n"
        "from forge_core.config import ConfigError, load_config\n"
        "from forge_core.config.catalog import StaticCatalog\n"
        "catalog = StaticCatalog()\n"
        "load_config(None, ['--model.vocab_size=300'], catalog=catalog)\n"  # imports while it still may
        "import forge_core.config.files, forge_core.config.lines\n"
        "if os.getuid() == 0:\n    os.setuid(65534)\n"
        "try:\n    load_config(sys.argv[1], catalog=catalog)\n"
        "except ConfigError as error:\n    print(error)\n"
    )
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False
    )
    assert done.stdout == f"{path}: cannot be read: Permission denied\n", done.stderr


def test_no_source_gives_the_defaults() -> None:
    config = load_config(None, [VOCAB], catalog=Catalog())
    assert config.get("train").max_steps == 1000
    assert list(config)[:4] == ["run", "model", "data", "train"]


# Origins ----------------------------------------------------------------------------------------------------


def test_origins_of_leaves_items_and_tables(tmp_path: Path) -> None:
    base = write(tmp_path, "base.toml", "[toys]\npair = [0.1, 0.2]\n[toys.inner]\ndepth = 2")
    path = write(tmp_path, "run.toml", "extends = 'base.toml'\n[[toys.items]]\nstart = 1")
    config = read(path, "--toys.words.1=z")
    assert config.origin("toys.pair") == config.origin("toys.pair.1") == str(base)
    assert config.origin("toys.inner.depth") == str(base)
    assert config.origin("toys.inner.names") == "default"
    assert config.origin("toys.items.0.start") == config.origin("toys.items") == str(path)
    assert config.origin("toys.items.0.weight") == "default"
    assert config.origin("toys.words.1") == "--toys.words.1=z"
    assert config.origin("model.n_kv_heads") == "derived"
    assert config.origin("model.vocab_size") == VOCAB


def test_problems_name_file_and_line(tmp_path: Path) -> None:
    text = (
        "# a comment\n[train]\nseed = 1\n\n[toys]\nwidth = 0\ninner = {depth = -1}\n"
        "[[toys.items]]\nstart = 1\n[[toys.items]]\nweight = 2.0\n[strict]\n"
    )
    path = write(tmp_path, "run.toml", text)
    with pytest.raises(ConfigError) as caught:
        read(path, "--train.seq_len=-4")
    lines = {p.path: p.origin for p in caught.value.problems}
    assert lines == {
        "train.seq_len": "--train.seq_len=-4",
        "toys.width": f"{path}:6",
        "toys.inner.depth": f"{path}:7",
        "toys.items.1.start": f"{path}:10",
        "strict.size": f"{path}:12",
    }
    # in the order of the file, then the flags
    assert list(lines) == [
        "toys.width",
        "toys.inner.depth",
        "toys.items.1.start",
        "strict.size",
        "train.seq_len",
    ]
    assert str(caught.value.problems[3]).startswith(f"{path}:12: strict.size: is required")
