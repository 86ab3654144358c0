"""Layers of configuration: values merged table by table, each leaf with its origin."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from forge_core.config.paths import Parts

DEFAULT = "default"
DERIVED = "derived"


@attrs.define
class Layers:
    """The merged values of all layers.

    Attributes:
        tree: tables as TOML holds them.
        origins: path of a leaf (or of an array as a whole) -> the file or flag it came from.
        tables: path of a table or array of tables -> the file or flag that named it last.
        files: name of a file, as origins use it -> where it lies.
        source: name of the main file, or "".
        heights: file -> its place among the layers, of several times the last; flags lie above all.
    """

    tree: dict[str, Any] = attrs.field(factory=dict)
    origins: dict[Parts, str] = attrs.field(factory=dict)
    tables: dict[Parts, str] = attrs.field(factory=dict)
    files: dict[str, Path] = attrs.field(factory=dict)
    source: str = ""
    heights: dict[str, int] = attrs.field(factory=dict)

    def merge(self, values: Mapping[str, Any], origin: str) -> None:
        """Lay a file over what is there: tables merge deep, anything else replaces the value as a whole."""
        self.heights[origin] = max(self.heights.values(), default=0) + 1
        self._merge(self.tree, values, origin, ())

    def _merge(self, below: dict[str, Any], above: Mapping[str, Any], origin: str, at: Parts) -> None:
        for name, value in above.items():
            here = (*at, name)
            present = below.get(name)
            if isinstance(value, dict):
                self.tables[here] = origin
                if not isinstance(present, dict):
                    if name in below:
                        self.forget(here)
                    below[name] = {}
                self._merge(below[name], value, origin, here)
            elif value is True and isinstance(present, dict):
                self.tables[here] = origin
            else:
                if name in below:
                    self.forget(here)
                below[name] = value
                self._record(value, origin, here)

    def _record(self, value: Any, origin: str, at: Parts) -> None:
        """Note the origin of every leaf of a value that replaces what was there."""
        if isinstance(value, dict):
            inside = value.items()
        elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
            inside = {str(i): item for i, item in enumerate(value)}.items()
        else:
            self.origins[at] = origin
            return
        self.tables[at] = origin
        for name, item in inside:
            self._record(item, origin, (*at, name))

    def put(self, parts: Parts, value: Any, origin: str) -> None:
        """Set one value, making the tables on the way; list indices must exist or be the next one.

        Raises LookupError, with the reason, where the way leads through a value that is no table or list.
        """
        holder: Any = self.tree
        for depth, part in enumerate(parts[:-1]):
            here = parts[: depth + 1]
            slot = _slot(holder, part)
            inner = holder[slot] if _holds(holder, slot) else None
            if not isinstance(inner, dict | list):
                if inner is not None and not isinstance(inner, bool):
                    raise LookupError(f"{part} is already a value, not a table")
                inner = {}
                self.forget(here)
                _store(holder, slot, inner)
            if isinstance(inner, dict) or depth + 2 < len(parts):
                self.origins.pop(here, None)
                self.tables[here] = origin
            holder = inner
        slot = _slot(holder, parts[-1])
        if value is True and _holds(holder, slot) and isinstance(holder[slot], dict):
            self.tables[parts] = origin
            return
        self.forget(parts)
        _store(holder, slot, value)
        self._record(value, origin, parts)

    def get(self, parts: Parts) -> Any:
        """The value at a path, or None."""
        holder: Any = self.tree
        for part in parts:
            try:
                holder = holder[_slot(holder, part)]
            except (LookupError, TypeError):
                return None
        return holder

    def forget(self, parts: Parts) -> None:
        """Drop the origins of a path and of all below it."""
        for origins in (self.origins, self.tables):
            for path in [path for path in origins if path[: len(parts)] == parts]:
                del origins[path]

    def origin(self, parts: Parts) -> str:
        """Where the value at a path came from: a file, a flag or "default"."""
        return find_origin(parts, self.origins, self.tables)

    def drop(self, parts: Parts) -> None:
        """Take the value at a path out, as if no layer had given it."""
        holder = self.get(parts[:-1])
        if isinstance(holder, dict):
            holder.pop(parts[-1], None)
        self.forget(parts)

    def span(self, parts: Parts) -> tuple[float, float] | None:
        """The lowest and the highest layer that gave the value at a path or a part of it; None: no layer."""
        found = [origin for path, origin in self.origins.items() if path[: len(parts)] == parts]
        heights = [self.heights.get(origin, math.inf) for origin in found]
        return (min(heights), max(heights)) if heights else None

    def blame(self, parts: Parts) -> str:
        """Where to look for a problem: origin of the value, else of the nearest table, else the source."""
        origin = self.origin(parts)
        if origin != DEFAULT:
            return origin
        for length in range(len(parts), 0, -1):
            if (table := self.tables.get(parts[:length])) is not None:
                return table
        return self.source


def find_origin(parts: Parts, origins: Mapping[Parts, str], tables: Mapping[Parts, str]) -> str:
    """The origin noted for a path itself, or for the array it lies in; "default" if there is none."""
    if parts in tables:
        return tables[parts]
    found = (origins.get(parts[:length]) for length in range(len(parts), 0, -1))
    return next((origin for origin in found if origin is not None), DEFAULT)


def _slot(holder: Any, part: str) -> Any:
    """The index into a list, or the key of a dict. LookupError if an index is out of reach."""
    if not isinstance(holder, list):
        return part
    if not part.isdecimal() or int(part) > len(holder):
        raise LookupError(f"{part} is no index of a list of {len(holder)} (count from 0)")
    return int(part)


def _holds(holder: Any, slot: Any) -> bool:
    return slot < len(holder) if isinstance(holder, list) else slot in holder


def _store(holder: Any, slot: Any, value: Any) -> None:
    if isinstance(holder, list) and slot == len(holder):
        holder.append(value)
    else:
        holder[slot] = value
