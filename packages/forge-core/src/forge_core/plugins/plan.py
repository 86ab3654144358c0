"""The plan: everything that plugins contribute to a run, frozen in its order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping

import attrs

from forge_core.contract import NamedOptimizer
from forge_core.plugins.registry import Contribution


@attrs.frozen(kw_only=True)
class Entry:
    """One line of the plan: hook, plugin with version, and what was contributed, in words."""

    hook: str
    plugin: str
    version: str
    what: str


@attrs.frozen
class Plan:
    """What runs in the loop, in order. `forge explain` prints it; ranks compare its fingerprint."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, contributions: Iterable[Contribution]) -> Plan:
        return cls(
            tuple(
                Entry(hook=c.hook, plugin=c.plugin, version=c.version, what=describe(c.value))
                for c in contributions
            )
        )

    @property
    def fingerprint(self) -> str:
        """The same on two ranks exactly if they run the same contributions in the same order."""
        text = json.dumps([attrs.astuple(entry) for entry in self.entries])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def describe(value: object) -> str:
    """A contribution in a few words, the same on every rank: its name where it has one, else its kind."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        return f"{value[0]}: {describe(value[1])}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {describe(inner)}" for name, inner in value.items())
    if isinstance(value, NamedOptimizer):
        return type(value.optimizer).__qualname__
    name = getattr(value, "name", None)
    if isinstance(name, str):
        phase = getattr(value, "phase", None)
        return f"{phase}: {name}" if isinstance(phase, str) else name
    return getattr(value, "__qualname__", None) or type(value).__qualname__
