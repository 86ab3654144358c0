"""The line of a key in a TOML file, for error messages."""

from __future__ import annotations

import re
from pathlib import Path

from forge_core.config.paths import Parts, split

_HEADER = re.compile(r"\s*(\[\[?)\s*(.+?)\s*\]\]?\s*(?:#.*)?\Z")
_KEY = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[A-Za-z0-9_.\s-])+?)\s*=""")


def line_of(file: Path, parts: Parts) -> int:
    """The line that sets the value at a path, or else of the nearest table around it; 0 if there is none.

    Reads line by line, without parsing: text over several lines that looks like keys can mislead it.
    """
    try:
        if not file.is_file():  # a pipe can be read once
            return 0
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, ValueError):
        return 0
    best, depth = 0, 0
    table: Parts = ()
    counts: dict[Parts, int] = {}
    for number, line in enumerate(lines, 1):
        header, key = _HEADER.match(line), _KEY.match(line)
        try:
            if header is not None:
                table = here = _table(split(header[2]), header[1] == "[[", counts)
            elif key is not None:
                here = (*table, *split(key[1]))
            else:
                continue
        except ValueError:
            continue
        common = len(here) if here == parts[: len(here)] else 0
        if common > depth:
            best, depth = number, common
    return best


def _table(names: Parts, array: bool, counts: dict[Parts, int]) -> Parts:
    """The path of a header, with the index of each array of tables it lies in."""
    here: Parts = ()
    for depth, name in enumerate(names):
        here = (*here, name)
        last = depth == len(names) - 1
        if array and last:
            counts[here] = counts.get(here, -1) + 1
        if here in counts:
            here = (*here, str(counts[here]))
    return here
