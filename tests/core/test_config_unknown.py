"""Keys and tables that do not exist: refused wherever they are, with the path and the likely right name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from configkit import Catalog, load, problems
from typokit import sweep, typos

from forge_core.config import Config, ConfigError, Problem, load_config
from forge_core.config.recipes import find_recipe
from forge_core.config.shape import plain
from forge_core.config.suggest import closest, distance, nearest
from forge_core.plugins import PluginCatalog, Plugins

# One fault each ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "flags", "path", "message"),
    [
        (
            "[optimizer]\nlearning_rte = 1",
            [],
            "optimizer.learning_rte",
            "unknown key in [optimizer] (keys: name, lr",
        ),
        ("[optimizer]\nweight_decy = 1", [], "optimizer.weight_decy", "did you mean weight_decay?"),
        ("lr = 1", [], "lr", "is not in a table (did you mean optimizer.lr?)"),
        ("[vlm]\nfusion = 1", [], "vlm", "no installed plugin owns [vlm]"),
        (
            "[[freeze.stages]]\nstart_step = 1\n[[freeze.stages]]\nstart_stp = 2",
            [],
            "freeze.stages.1.start_stp",
            "did you mean start_step?",
        ),
        ("", ["--train.seq_lne=5"], "train.seq_lne", "did you mean seq_len?"),
        ("[toys]\nwidht = 3", [], "toys.widht", "did you mean width?"),
        (
            "[toys.inner]\ndept = 3",
            [],
            "toys.inner.dept",
            "unknown key in [toys.inner] (did you mean depth?)",
        ),
        ("[toys.named.a]\ndept = 3", [], "toys.named.a.dept", "did you mean depth?"),
        ("[toys.glue]\ndryin = 3", [], "toys.glue.dryin", "did you mean drying?"),
        ("[toys]\ngloss = 0.1", [], "toys.gloss", "did you mean toys.paint.gloss?"),
        ("[toys.gleu]\ndrying = 1", [], "toys.gleu", "did you mean glue?"),
        ("[model]\nfactor = 2.0", [], "model.factor", "did you mean model.rope_scaling.factor?"),
        ("[train]\ncrate = 2", [], "train.crate", "did you mean strict.crate?"),
        ("[train]\nwarmup_steps = 2", [], "train.warmup_steps", "did you mean scheduler.warmup_steps?"),
        ("[train]\nbatchSize = 2", [], "train.batchSize", "did you mean batch_size?"),
        ("[train]\nBATCH-SIZE = 2", [], "train.BATCH-SIZE", "did you mean batch_size?"),
        ("[scheduler]\nwarmup = 2", [], "scheduler.warmup", "did you mean warmup_steps or warmup_from_zero?"),
        (
            "[optimzer]\nlr = 1",
            [],
            "optimzer",
            "no installed plugin owns [optimzer] (did you mean [optimizer]?)",
        ),
        ("[rope_scaling]\nfactor = 2.0", [], "rope_scaling", "did you mean [model.rope_scaling]?"),
        ("zzz = true", [], "zzz", "no installed plugin owns [zzz]"),
        ("zzz = 3", [], "zzz", "is not in a table (a key belongs under a [table] header)"),
        ("extend = 'x'", [], "extend", "is not in a table (did you mean extends?)"),
        ("", ["--extends=base.toml"], "extends", "belongs into a file"),
        ("", ["--lr=1"], "lr", "did you mean optimizer.lr?"),
        ("", ["--zzz.x.y=1"], "zzz", "no installed plugin owns [zzz]"),
        ("", ["--train.zzz"], "train.zzz", "unknown key in [train]"),
        ("[train]\n'a.b' = 1", [], 'train."a.b"', "unknown key in [train]"),
    ],
)
def test_one_fault(text: str, flags: list[str], path: str, message: str) -> None:
    found = problems(text, flags)
    assert list(found) == [path]
    assert message in found[path]


def test_an_unknown_table_is_answered_with_the_tables_of_installed_plugins() -> None:
    message = problems("[xyz]\na = 1")["xyz"]
    assert "installed plugins own [broken], [plain], [strict], [toys]" in message
    assert (
        "a table [NAME] belongs to the plugin of that name: pip install the package that brings it" in message
    )


def test_a_key_of_another_plugins_table_comes_before_a_near_one_of_the_same_table() -> None:
    class WithEp(Catalog):
        def keys_elsewhere(self, key: str) -> list[str]:
            return ["moe.ep"] if key == "ep" else []

    with pytest.raises(ConfigError) as caught:
        load("[distributed]\nep = 2", catalog=WithEp())
    assert "did you mean moe.ep, tp or cp?" in str(caught.value)


def test_options_of_components_are_suggested_even_if_the_catalog_does_not_look_there() -> None:
    class Blind(Catalog):
        def keys_elsewhere(self, key: str) -> list[str]:
            return []

    with pytest.raises(ConfigError) as caught:
        load("[toys]\ngloss = 1.0", catalog=Blind())
    assert "did you mean toys.paint.gloss?" in str(caught.value)


def test_an_ambiguous_key_counts_as_none() -> None:
    seen = []

    def hook(config: Config, world_size: int) -> list[Problem]:
        seen.append((config.get("distributed").tp, config.get("distributed").cp))
        return []

    with pytest.raises(ConfigError):
        load("[distributed]\np = 2", problems=hook)
    assert seen == [(1, 1)]


def test_a_misspelt_key_counts_as_the_right_one_for_the_rest() -> None:
    found = problems("[strict]\nsze = 3\n[model]\nn_head = 4\ndim = 10\n[toys]\nwidht = 'x'")
    assert set(found) == {"strict.sze", "model.n_head", "model.dim", "toys.widht"}
    assert found["model.dim"].startswith("10 is not divisible by n_heads = 4")


def test_many_faults_are_one_report(tmp_path: Path) -> None:
    text = (
        "lr = 1\n[optimzer]\nlr = 2\n[optimizer]\nlr = '1e-4'\nbetas = [0.9, 1.5]\n"
        "[model]\nn_head = 4\n[strict]\n[toys]\nfinish = 'pant'\n"
    )
    with pytest.raises(ConfigError) as caught:
        load(text, ["--train.seed=x", "--nothing.here=1"], folder=tmp_path)
    lines = str(caught.value).split("\n")
    assert len(lines) == len(caught.value.problems) == 9
    assert all(problem.origin for problem in caught.value.problems)
    assert f"{tmp_path / 'run.toml'}:5: optimizer.lr: expected a number" in str(caught.value)
    assert caught.value.exit_status == 2


# Distances --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "far"),
    [
        ("lr", "lr", 0),
        ("lr", "rl", 1),
        ("seed", "sed", 1),
        ("seed", "seeed", 1),
        ("seed", "sead", 1),
        ("", "abc", 3),
        ("abcd", "badc", 2),
        ("kitten", "sitting", 3),
    ],
)
def test_distance(a: str, b: str, far: int) -> None:
    assert distance(a, b) == distance(b, a) == far


def test_nearest() -> None:
    assert nearest("p", ["tp", "cp", "ranks"]) == ["tp", "cp"]
    assert nearest("completely", ["other", "words"]) == []
    assert nearest("part", ["mine/part", "other"]) == ["mine/part"]
    assert closest("chekc", ["train", "check"]) == "check"
    assert closest("zzz", ["train"]) is None


# Every key, one typo ----------------------------------------------------------------------------------------


def everything(catalog: PluginCatalog) -> dict[str, Any]:
    """A configuration with every key of the core, in tables, items of arrays and options of components."""
    config = load_config(None, ["--model.vocab_size=300"], catalog=catalog)
    tree = {name: plain(table) for name, table in config.tables.items()}
    tree["freeze"]["stages"] = [{"start_step": 1, "modules": []}, {"start_step": 2, "modules": []}]
    tree["optimizer"]["groups"] = [{"modules": "x", "lr_scale": 1.0, "weight_decay": 0.0}]
    tree["run"].pop("choose")
    values: dict[str, Any] = {
        "run": {"name": "x"},
        "data": {"path": "x", "eos_token": "x"},
        "metrics": {"peak_tflops": 1.0},
        "train": {"grad_accum_steps": 1, "global_batch_size": 8},
        "scheduler": {"decay_steps": 1},
        "model": {"init_from": "x"},
        "profiling": {"start_step": 1},
    }
    for name, more in values.items():
        tree[name] |= more
    tree["model"]["rope_scaling"]["attention_factor"] = 1.0
    for category, table in (
        ("optimizer", "optimizer"),
        ("schedule", "scheduler"),
        ("data_source", "data"),
        ("writer", "metrics"),
    ):
        for name in catalog.component_names(category):
            options = catalog.options(catalog.component(category, name))
            if options is not None:
                tree[table][name] = plain(options())
    return tree


def sources() -> Iterator[tuple[str, PluginCatalog, dict[str, Any]]]:
    import tomli

    path = find_recipe("quickstart")  # those of other packages: tests/combos/test_typos.py
    assert path is not None
    yield "recipe quickstart", PluginCatalog(Plugins.isolated()), tomli.loads(path.read_text())
    core = PluginCatalog(Plugins.isolated())
    yield "every key of the core", core, everything(core)


@pytest.mark.parametrize("share", [pytest.param(1, marks=(pytest.mark.slow, pytest.mark.timeout(600))), 8])
def test_a_typo_in_any_key_is_refused_and_the_right_key_suggested(tmp_path: Path, share: int) -> None:
    """All typos of the recipes, and every `share`-th of a configuration with every key of the core."""

    def some(word: str) -> list[str]:
        return sorted(set(typos(word)))[len(word) % share :: share]

    for label, catalog, tree in sources():
        tree.setdefault("model", {})["vocab_size"] = 300
        recipe = label.startswith("recipe")
        chosen = (lambda word: sorted(set(typos(word)))) if recipe else some
        tried, helped, missed = sweep(tmp_path / "run.toml", catalog, tree, chosen)
        print(f"{label}: {tried} typos, suggested in {100 * helped / tried:.1f} %; missed {missed[:5]}")
        assert tried > (100 if recipe else 2000 / share)
        assert helped >= 0.95 * tried
