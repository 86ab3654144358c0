"""Dotted paths: `optimizer.muon.momentum`, `metrics."mine/writer".project`, `freeze.stages.0.start_step`."""

from __future__ import annotations

import json
import re

Parts = tuple[str, ...]

_BARE = re.compile(r"[A-Za-z0-9_-]+\Z")
_SEGMENT = re.compile(r"""\s*(?:"((?:[^"\\]|\\.)*)"|'([^']*)'|([^."'\s][^."']*?))\s*(\.|\Z)""")


def dotted(parts: Parts) -> str:
    """Join segments with dots; a segment that is not a bare TOML key is quoted."""
    return ".".join(part if _BARE.match(part) else json.dumps(part, ensure_ascii=False) for part in parts)


def split(text: str) -> Parts:
    """Cut a dotted path into segments, honouring quotes. Raises ValueError for an empty or broken segment."""
    parts: list[str] = []
    at = 0
    while True:
        match = _SEGMENT.match(text, at)
        if match is None:
            raise ValueError(f"{text!r} is not a dotted name")
        double, single, bare, dot = match.groups()
        parts.append(
            json.loads(f'"{double}"') if double is not None else single if single is not None else bare
        )
        at = match.end()
        if not dot:
            return tuple(parts)


def lookup(text: str) -> Parts:
    """As `split`, but "" is the empty path and text that cannot be cut stays one segment."""
    try:
        return split(text) if text else ()
    except ValueError:
        return (text,)
