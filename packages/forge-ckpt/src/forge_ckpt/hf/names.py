"""Names with numbers in them: `layers.{layer}.attn.q_proj.weight`."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

_WORD = re.compile(r"\{(\w+)\}")


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = _WORD.split(pattern)
    seen: set[str] = set()
    text = ""
    for number, part in enumerate(parts):
        if number % 2 == 0:
            text += re.escape(part)
        else:
            text += rf"(?P={part})" if part in seen else rf"(?P<{part}>\d+)"
            seen.add(part)
    return re.compile(text)


def match(pattern: str, name: str) -> dict[str, str] | None:
    """The numbers that make `name` of `pattern`, None if it is not made of it."""
    found = _compiled(pattern).fullmatch(name)
    return None if found is None else found.groupdict()


def fill(pattern: str, numbers: Mapping[str, str]) -> str:
    """`pattern` with its numbers."""
    return _WORD.sub(lambda found: numbers[found[1]], pattern)
