"""Derived values, problems of tables, the problems hook, and the order of all that."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from configkit import Catalog, ToysConfig, load, problems

from forge_core.config import Config, ConfigError, Problem, evolve, key, table
from forge_core.config.tables import ModelConfig, TrainConfig
from forge_core.errors import DataError


class With(Catalog):
    """The test catalog and more plugin tables."""

    def __init__(self, **tables: type) -> None:
        super().__init__()
        self._tables.update(tables)


@table
class Part:
    """A part."""

    size: int | None = key(None, help="Size.")

    def resolve(self, config: Config) -> Part:
        return self if self.size is not None else evolve(self, size=config[TrainConfig].batch_size)

    def problems(self) -> Iterator[Problem]:
        if self.size == 13:
            yield Problem("size", "brings bad luck")


@table
class Whole:
    """A table."""

    part: Part = key(factory=Part, help="One.")
    parts: list[Part] = key(factory=list, help="Several.")


# The core's own derived values ------------------------------------------------------------------------------


def test_values_of_the_model() -> None:
    model = load("[model]\ndim = 4096\nn_heads = 32")[ModelConfig]
    assert (model.head_dim, model.ffn_hidden_dim, model.n_kv_heads) == (128, 11008, 32)
    assert (
        load("[model]\ndim = 4096\nn_heads = 32\nffn_dim_multiplier = 1.3")[ModelConfig].ffn_hidden_dim
        == 14336
    )
    assert load("[model]\nactivation = 'gelu'")[ModelConfig].gated_mlp is False


def test_kv_heads_follow_the_final_number_of_heads(tmp_path: Any) -> None:
    assert load("[model]\nn_heads = 64\ndim = 4096")[ModelConfig].n_kv_heads == 64
    assert load("[model]\nn_heads = 16", ["--model.n_heads=32"])[ModelConfig].n_kv_heads == 32
    assert load("[model]\nn_kv_heads = 2")[ModelConfig].n_kv_heads == 2
    saved = load("[model]\nn_heads = 16").to_toml()
    assert (
        load(saved, ["--model.n_heads=32", "--model.dim=1024"])[ModelConfig]
        == load("[model]\nn_heads = 32\ndim = 1024")[ModelConfig]
    )


def test_values_from_other_tables() -> None:
    config = load("[train]\nseq_len = 77\nseed = 5\nbatch_size = 3")
    assert config[ModelConfig].max_seq_len == 77
    assert config.get("data").seed == 5
    assert config.get("eval").batch_size == 3
    assert load("[train]\nseed = 5\n[data]\nseed = 0").get("data").seed == 0


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        (
            "[model]\ndim = 100\nn_heads = 3",
            "model.dim",
            "100 is not divisible by n_heads = 3 (or set head_dim)",
        ),
        ("[model]\nn_kv_heads = 3", "model.n_kv_heads", "3 does not divide n_heads = 8 ()"),
        ("[model]\nhead_dim = 5", "model.head_dim", "rotary positions need an even head width, not 5 ()"),
        (
            "[train]\nglobal_batch_size = 12",
            "train.global_batch_size",
            "12 is not a multiple of batch_size = 8 ()",
        ),
        (
            "[run]\nname = 'a/b'",
            "run.name",
            "\"a/b\" is not a folder name (letters, digits, '-', '_' and '.')",
        ),
        (
            "freeze.stages = [{start_step = 4}, {start_step = 4}]",
            "freeze.stages.1.start_step",
            "4 does not come after 4 ()",
        ),
    ],
)
def test_problems_of_core_tables(text: str, path: str, message: str) -> None:
    assert problems(text)[path] == message


# Resolving --------------------------------------------------------------------------------------------------


def test_tables_may_depend_on_each_other_in_any_order() -> None:
    @table
    class First:
        """A table."""

        value: int | None = key(None, help="From second.")

        def resolve(self, config: Config) -> First:
            other = config.get("zsecond").value
            return self if other is None else evolve(self, value=other + 1)

    @table
    class Second:
        """A table."""

        value: int | None = key(None, help="From train.")

        def resolve(self, config: Config) -> Second:
            return evolve(self, value=config[TrainConfig].seq_len)

    config = load("[afirst]\n[zsecond]", catalog=With(afirst=First, zsecond=Second))
    assert (config.get("afirst").value, config.get("zsecond").value) == (513, 512)
    assert config.origin("afirst.value") == "derived"


def test_values_that_never_settle() -> None:
    @table
    class Restless:
        """A table."""

        value: int = key(0, help="Grows.")

        def resolve(self, config: Config) -> Restless:
            return evolve(self, value=self.value + 1)

    with pytest.raises(RuntimeError, match="derived values of restless do not settle"):
        load("[restless]", catalog=With(restless=Restless))


def test_inner_tables_are_resolved_too() -> None:
    config = load("[whole]\nparts = [{size = 1}, {}]", catalog=With(whole=Whole))
    whole = config.get("whole")
    assert (whole.part.size, [part.size for part in whole.parts]) == (8, [1, 8])
    assert config.origin("whole.part.size") == config.origin("whole.parts.1.size") == "derived"
    found = problems("[whole]\nparts = [{size = 1}, {size = 13}]", catalog=With(whole=Whole))
    assert found == {"whole.parts.1.size": "brings bad luck ()"}
    assert "whole.part.size" in problems("train.batch_size = 13\n[whole]", catalog=With(whole=Whole))


def test_an_error_while_resolving_is_a_problem_of_the_table() -> None:
    @table
    class Reader:
        """A table."""

        def resolve(self, config: Config) -> Reader:
            raise DataError("x.json: no such file", "give another")

    found = problems("[reader]\n[toys]\nwidth = 0", catalog=With(reader=Reader))
    assert found["reader"] == "x.json: no such file (give another)"
    assert "toys.width" in found


def test_a_bug_while_resolving_shows_with_the_table() -> None:
    @table
    class Buggy:
        """A table."""

        def resolve(self, config: Config) -> Buggy:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        load("[buggy]", catalog=With(buggy=Buggy))
    assert "while values of [buggy] were derived" in caught.value.__notes__
    assert list(problems("[buggy]\n[toys]\nwidth = 0", catalog=With(buggy=Buggy))) == ["toys.width"]

    @table
    class Forgetful:
        """A table."""

        def resolve(self, config: Config) -> None:
            evolve(self)

    with pytest.raises(TypeError, match="resolve must return"):
        load("[forgetful]", catalog=With(forgetful=Forgetful))


def test_validators_of_an_attrs_class_become_problems() -> None:
    import attrs

    from forge_core.config.fields import METADATA, Key

    @attrs.frozen(kw_only=True)
    class Checked:
        """A table."""

        size: int = attrs.field(
            default=1, metadata={METADATA: Key(help="Size.")}, validator=attrs.validators.lt(5)
        )

    assert "'size' must be < 5" in problems("[checked]\nsize = 7", catalog=With(checked=Checked))["checked"]


# The hook ---------------------------------------------------------------------------------------------------


def test_the_hook_sees_the_resolved_configuration_and_the_number_of_ranks() -> None:
    seen: list[tuple[int | None, int]] = []

    def hook(config: Config, world_size: int) -> Iterator[Problem]:
        seen.append((config[ModelConfig].n_kv_heads, world_size))
        yield from ()

    load("", world_size=6, problems=hook)
    assert seen == [(8, 6)]


def test_problems_of_structure_tables_and_hook_are_one_report_in_this_order() -> None:
    def hook(config: Config, world_size: int) -> Iterator[Problem]:
        assert "toys" in config
        yield Problem("toys.width", "clashes with the number of ranks", f"use {world_size}")
        yield Problem("toys.width", "clashes with the number of ranks", "said twice")
        yield Problem("", "is odd as a whole", origin="elsewhere")

    with pytest.raises(ConfigError) as caught:
        load("[toys]\nwidth = 2\nflag = 3", ["--model.dim=9"], world_size=3, problems=hook)
    found = [(p.path, p.origin) for p in caught.value.problems]
    assert [path for path, _ in found] == ["toys.width", "toys.flag", "model.dim", "model.head_dim", ""]
    assert str(found[0][1]).endswith("run.toml:2")
    assert found[2][1] == "--model.dim=9"
    assert found[4][1] == "elsewhere"
    assert "(use 3)" in str(caught.value)


def test_a_hook_that_fails_shows_unless_something_else_is_wrong() -> None:
    def hook(config: Config, world_size: int) -> Iterator[Problem]:
        raise LookupError("a bug in a plugin")

    with pytest.raises(LookupError):
        load("", problems=hook)
    assert list(problems("[toys]\nwidth = 0", problems=hook)) == ["toys.width"]


def test_replace() -> None:
    config = load("[toys]")
    changed = config.replace(toys=evolve(config[ToysConfig], width=9))
    assert (changed[ToysConfig].width, config[ToysConfig].width) == (9, 4)
    assert changed != config
    assert changed.plugins == ("toys",)
