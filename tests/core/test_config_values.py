"""Types of values in files and flags: what is taken, what is refused, and with which words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from configkit import Inner, Item, ToysConfig, load, problems


def toys(text: str = "", *flags: str) -> ToysConfig:
    return load(f"[toys]\n{text}", flags)[ToysConfig]


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("number", "1", 1.0),
        ("number", "1.0", 1.0),
        ("number", "1e-4", 0.0001),
        ("number", "3e-4", 0.0003),
        ("number", "1_000.0", 1000.0),
        ("number", "0", 0.0),
        ("width", "100", 100),
        ("width", "1_000", 1000),
        ("flag", "true", True),
        ("flag", "false", False),
        ("pair", "[0.9,0.95]", (0.9, 0.95)),
        ("pair", "[0, 0.5]", (0.0, 0.5)),
        ("many", "[1,2,3]", (1, 2, 3)),
        ("many", "[]", ()),
        ("weights", "[[1,2],[3]]", [[1, 2], [3]]),
        ("words", "[]", []),
        ("words", '["x, y", "z"]', ["x, y", "z"]),
        ("limit", "3", 3),
        ("limit", "0", 0),
        ("amount", "2", 2),
        ("amount", "2.5", 2.5),
        ("resume", "false", False),
        ("labels", "{a = 1, b = 2}", {"a": 1, "b": 2}),
        ("items", "[{start = 1}, {start = 5, weight = 2}]", [Item(start=1), Item(start=5, weight=2.0)]),
        ("inner", "{depth = 3}", Inner(depth=3)),
    ],
)
def test_file_and_flag_give_the_same_typed_value(key: str, written: str, value: Any) -> None:
    for given in (toys(f"{key} = {written}"), toys("", f"--toys.{key}={written}")):
        read = getattr(given, key)
        assert read == value
        assert type(read) is type(value)
        if isinstance(value, list | tuple):
            assert [type(item) for item in read] == [type(item) for item in value]


REFUSED = [
    ("width", "10.5", "expected an integer, not 10.5"),
    ("width", "1e3", "expected an integer, not 1000.0 (write 1000)"),
    ("width", "true", "expected an integer, not true"),
    ("width", '"4"', 'expected an integer, not "4" (drop the quotes)'),
    ("width", '"four"', 'expected an integer, not "four" ()'),
    ("width", "0", "must be > 0, not 0"),
    ("width", "[4]", "expected an integer, not [4]"),
    ("width", "{a = 1}", "expected an integer, not a table"),
    ("number", '"1e-4"', 'expected a number, not "1e-4" (drop the quotes)'),
    ("number", "nan", "expected a finite number, not nan"),
    ("number", "inf", "expected a finite number, not inf"),
    ("number", "-inf", "expected a finite number, not -inf"),
    ("number", "-2", "must be >= -1, not -2.0"),
    ("number", "false", "expected a number, not false"),
    ("flag", "1", "expected true or false, not 1"),
    ("flag", '"false"', 'expected true or false, not "false" (drop the quotes)'),
    ("title", "3", 'expected text, not 3 (write "3")'),
    ("title", "true", 'expected text, not true (write "true")'),
    ("title", "2024-01-01", "expected text, not 2024-01-01"),
    ("pair", "[0.1]", "expected a list of 2 (number, number), not [0.1]"),
    ("pair", "[0.1, 0.2, 0.3]", "expected a list of 2"),
    ("pair", "0.1", "expected a list of 2"),
    ("words", '"a"', 'expected list of text, not "a" (write ["a"])'),
    ("limit", "true", "expected an integer, not true"),
    ("mode", '"quick"', "must be one of 'slow', 'fast', not \"quick\""),
    ("shape", '"sqare"', 'must be one of "round", "square", not "sqare" (did you mean square?)'),
    ("labels", "3", "expected a table, not 3"),
    ("inner", "3", "expected a table, not 3"),
    ("inner", "false", "this table cannot be turned off"),
    ("items", "{start = 1}", "write [[toys.items]], not [toys.items]"),
    ("resume", "3", "expected text or true or false, not 3"),
]


@pytest.mark.parametrize(("key", "written", "message"), REFUSED)
def test_what_does_not_fit_is_refused(key: str, written: str, message: str) -> None:
    found = problems(f"[toys]\n{key} = {written}")
    assert list(found) == [f"toys.{key}"]
    assert message in found[f"toys.{key}"]


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ("pair = [0.1, 1.5]", "toys.pair.1", "must be >= 0 and < 1, not 1.5"),
        ("pair = [true, 0.5]", "toys.pair.0", "expected a number, not true"),
        ("many = [1, 2.5]", "toys.many.1", "expected an integer, not 2.5"),
        ('weights = [[1], [2, "3"]]', "toys.weights.1.1", "drop the quotes"),
        ("words = ['a', 1]", "toys.words.1", "expected text, not 1"),
        ("labels = {a = 1, b = 2.5}", "toys.labels.b", "expected an integer"),
        ("items = [{start = 1}, {start = 0}]", "toys.items.1.start", "must be >= 1, not 0"),
        ("items = [{weight = 2.0}]", "toys.items.0.start", "is required (Required.)"),
        ("items = [3]", "toys.items.0", "expected a table, not 3"),
        ("named.a.depth = -1", "toys.named.a.depth", "must be >= 0, not -1"),
        ("[[toys.inner]]\ndepth = 1", "toys.inner", "write [toys.inner], not [[toys.inner]]"),
    ],
)
def test_a_problem_inside_a_value_has_its_path(text: str, path: str, message: str) -> None:
    found = problems(f"[toys]\n{text}")
    assert list(found) == [path]
    assert message in found[path]


def test_every_bad_item_is_reported() -> None:
    assert list(problems("[toys]\nmany = [1, true, 2.5]")) == ["toys.many.1", "toys.many.2"]


def test_optional_keys_take_none_as_text_in_files_and_flags() -> None:
    assert toys('limit = "none"').limit is None
    assert toys("", "--toys.limit=none").limit is None
    assert toys("", "--toys.limit=null").limit is None
    assert toys('note = "x"', "--toys.note=none").note is None
    assert toys("", "--toys.title=none").title == "none"


def test_nested_tables_keep_the_default_of_the_keys_left_out() -> None:
    assert toys("inner.names = ['x']").inner == Inner(depth=7, names=["x"])
    assert toys("").inner == Inner(depth=7)


def test_an_optional_table_is_switched_by_a_boolean() -> None:
    assert toys().extra is None
    assert toys("extra = true").extra == Inner()
    assert toys("extra = false").extra is None
    assert toys("extra = {depth = 2}", "--toys.extra=false").extra is None
    assert toys("", "--toys.extra.depth=5").extra == Inner(depth=5)


def test_other_types_are_structured_by_cattrs() -> None:
    assert toys('path = "a/b"').path == Path("a/b")
    assert toys("", "--toys.path=a/b").path == Path("a/b")


def test_huge_numbers_do_not_crash() -> None:
    assert "finite" in problems(f"[toys]\nnumber = {10**400}")["toys.number"]
    assert toys(f"width = {10**30}").width == 10**30
