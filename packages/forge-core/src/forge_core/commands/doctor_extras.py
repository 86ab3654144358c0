"""Extras of installed plugin packages, as their metadata have them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib import metadata

import attrs

from forge_core.plugins.discovery import GROUP

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_EXTRA = re.compile(r"""\bextra\s*==\s*["']([^"']+)["']""")
_FOR_AUTHORS = frozenset({"dev", "doc", "docs", "test", "tests", "testing"})
"""Names of extras that users have no use for."""


@attrs.frozen
class Extra:
    """An extra of a distribution.

    Attributes:
        name: as pip takes it, e.g. "forge-ckpt[s3]".
        there: distributions that it asks for and that are installed, with their versions.
        missing: requirements that are not.
    """

    name: str
    there: tuple[str, ...]
    missing: tuple[str, ...]


def plugin_extras() -> Iterator[Extra]:
    """Extras of all distributions with plugins, by name. Versions are not compared: pip does that."""
    found = {point.dist.name: point.dist for point in metadata.entry_points(group=GROUP) if point.dist}
    for name in sorted(found):
        for extra, requirements in sorted(_requirements(found[name]).items()):
            versions = {requirement: _version(requirement) for requirement in requirements}
            yield Extra(
                name=f"{name}[{extra}]",
                there=tuple(version for version in versions.values() if version),
                missing=tuple(requirement for requirement, version in versions.items() if not version),
            )


def _requirements(distribution: metadata.Distribution) -> Mapping[str, list[str]]:
    """By extra, what it asks for, without the markers."""
    found: dict[str, list[str]] = {}
    for line in distribution.requires or []:
        requirement, _, marker = line.partition(";")
        for extra in _EXTRA.findall(marker):
            if extra not in _FOR_AUTHORS:
                found.setdefault(extra, []).append(requirement.strip())
    return found


def _version(requirement: str) -> str:
    """Name and version of the installed distribution; "" if there is none."""
    match = _NAME.match(requirement)
    if match is None:
        return ""
    try:
        return f"{match[0]} {metadata.version(match[0])}"
    except metadata.PackageNotFoundError:
        return ""
