"""Keys of records that are one typing error away from one that is read. Imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import attrs

from forge_core.config.suggest import distance, normal
from forge_core.data.wording import counted
from forge_vlm.data.telling import NAMED, Told

TEXTS = (
    ("prompt", "messages", "conversations"),
    ("answer", "answers", "caption", "messages", "conversations"),
    ("choices",),
)
"""Keys of the text of a sample; one of each tuple is enough, and the others are not missed beside it."""
FILES = (("image", "images"), ("video", "videos"))
"""Keys that name files."""
_MOST = 1000
"""Different keys that are compared; where there are more, they are names of somebody's own."""
_log = logging.getLogger("forge.data")


@attrs.define
class OddKeys:
    """Counts keys that are not read, where one that is read differs by a letter and is not there.

    Every other key is somebody's own (ids, licences, addresses, ...) and is left alone.

    Attributes:
        known: tuples of keys, see `TEXTS`.
        told: the samples by key and what it may be meant for.
    """

    known: tuple[tuple[str, ...], ...] = TEXTS + FILES
    told: dict[tuple[str, str], Told] = attrs.field(factory=dict)
    _meant: dict[str, str] = attrs.field(factory=dict)

    def look(self, name: str, record: Mapping[str, Any]) -> None:
        """Look at the keys of the sample `name`."""
        for key in record:
            meant = self._meant.get(key)
            if meant is None:
                meant = self._compared(key)
            if meant and not self._has(record, meant):
                self.told.setdefault((key, meant), Told()).add(name)

    def _has(self, record: Mapping[str, Any], meant: str) -> bool:
        """Whether a record has a key, or one that stands for it."""
        return any(record.get(key) is not None for group in self.known if meant in group for key in group)

    def _compared(self, key: str) -> str:
        """The key that is read and that one which is not may be meant for; "": none."""
        if len(self._meant) >= _MOST:
            return ""
        names = list(dict.fromkeys(name for group in self.known for name in group))
        nearest = min(names, key=lambda name: distance(normal(key), name))
        meant = "" if key in names or distance(normal(key), nearest) > 1 else nearest
        self._meant[key] = meant
        return meant

    def facts(self) -> list[list[Any]]:
        """As JSON, for `tell_odd_keys`."""
        return [[*keys, told.count, told.names[:NAMED]] for keys, told in self.told.items()]


def tell_odd_keys(source: str, total: int, facts: list[list[Any]]) -> None:
    """Say once for each such key how many samples have it, to the log.

    Args:
        source: its name. total: samples. facts: see `OddKeys.facts`.
    """
    for key, near, count, names in facts:
        _log.warning(
            "%s: %d of %s have the key %r, which is not read; did you mean %r? (%s)",
            source,
            count,
            counted(total, "sample"),
            key,
            near,
            Told(count, names),
        )
