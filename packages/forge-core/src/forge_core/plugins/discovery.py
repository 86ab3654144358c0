"""Which plugins are installed, found from package metadata without importing any of them."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

import attrs

GROUP = "forge"


@attrs.frozen(kw_only=True)
class Candidate:
    """An installed plugin, not yet imported.

    Attributes:
        name: entry-point name, which is also the plugin's table.
        source: "module" or "module:object" that holds the hook implementations.
        distribution, version: the package that brings it.
        loaded: the plugin object itself where it was handed over instead of found (tests, scripts).
    """

    name: str
    source: str
    distribution: str = ""
    version: str = ""
    loaded: object | None = None

    def load(self) -> object:
        """Import the plugin; whatever the import raises passes through."""
        if self.loaded is not None:
            return self.loaded
        return EntryPoint(name=self.name, value=self.source, group=GROUP).load()

    @property
    def label(self) -> str:
        return f"{self.source} ({self.distribution} {self.version})" if self.distribution else self.source


def discover() -> tuple[Candidate, ...]:
    """All installed plugins, sorted by name, so that every machine sees one order.

    The order of entry points on disk differs between machines and must not matter.
    """
    found = set()
    for point in entry_points(group=GROUP):
        dist = point.dist
        found.add(
            Candidate(
                name=point.name,
                source=point.value,
                distribution=dist.name if dist else "",
                version=dist.version if dist else "",
            )
        )
    return tuple(sorted(found, key=lambda c: (c.name, c.distribution, c.source)))
