"""Strict conversion of single values: what cattrs would coerce is refused, with the way out."""

from __future__ import annotations

import json
import math
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any

import cattrs

from forge_core.config.shape import describe, is_literal

_LONGEST = 60


class LeafError(ValueError):
    """A value that does not fit its type: a message and perhaps a hint."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def show(value: Any) -> str:
    """A value as the user wrote it, shortened."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
    elif isinstance(value, list | tuple):
        text = f"[{', '.join(show(inner) for inner in value)}]"
    elif value is None:
        return "none"
    else:
        text = str(value)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def read_leaf(annotation: Any, value: Any) -> Any:
    """Convert one value to a type that is no container. Raises LeafError."""
    try:
        return converter().structure(value, annotation)
    except LeafError:
        raise
    except Exception as error:
        if isinstance(annotation, type) and isinstance(value, annotation):
            return value
        raise LeafError(f"expected {describe(annotation)}, not {show(value)}") from error


@cache
def converter() -> cattrs.Converter:
    """The converter, with our hooks in place of those that coerce."""
    made = cattrs.Converter()
    made.register_structure_hook(bool, _boolean)
    made.register_structure_hook(int, _integer)
    made.register_structure_hook(float, _number)
    made.register_structure_hook(str, _text)
    made.register_structure_hook_func(lambda kind: is_literal(kind), _literal)
    return made


def _boolean(value: Any, _: Any) -> bool:
    if isinstance(value, bool):
        return value
    quoted = isinstance(value, str) and value.lower() in ("true", "false")
    raise LeafError(f"expected true or false, not {show(value)}", "drop the quotes" if quoted else "")


def _integer(value: Any, _: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    hint = ""
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        hint = f"write {int(value)}"
    raise LeafError(f"expected an integer, not {show(value)}", hint or _quotes(value, int))


def _number(value: Any, _: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isfinite(number):
            return number
        raise LeafError(f"expected a finite number, not {show(value)}")
    raise LeafError(f"expected a number, not {show(value)}", _quotes(value, float))


def _text(value: Any, _: Any) -> str:
    if isinstance(value, str):
        if "\0" in value:
            raise LeafError("holds the character NUL, which no file name or text may")
        return value
    single = isinstance(value, bool | int | float)
    raise LeafError(f"expected text, not {show(value)}", f'write "{show(value)}"' if single else "")


def _literal(value: Any, kind: Any) -> Any:
    for choice in typing.get_args(kind):
        if choice == value and type(choice) is type(value):
            return choice
    raise LeafError(f"must be {describe(kind)}, not {show(value)}")


def _quotes(value: Any, number: type) -> str:
    if not isinstance(value, str):
        return ""
    try:
        number(value)
    except ValueError:
        return ""
    return "drop the quotes"
