"""Metric writers side by side, and what the built-in ones share.

metrics.jsonl is the record of a run and must be whole. Every other writer is a convenience: it has to start,
but if it fails later it is switched off with one warning and the run goes on.
"""

from __future__ import annotations

import importlib
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge_core.contract import Writer
from forge_core.errors import ForgeError
from forge_core.metrics.options import install_hint


class WriterSet:
    """Several writers as one.

    Args:
        writers: by the name users know, already started.
        notice: shows one line to the user.
    """

    def __init__(self, writers: Mapping[str, Writer], notice: Callable[[str], None]) -> None:
        self.writers = dict(writers)
        self.notice = notice

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand a record to each writer; one that fails is switched off for the rest of the run."""
        for name, writer in list(self.writers.items()):
            try:
                writer.write(step, metrics)
            except Exception as error:
                del self.writers[name]
                self._warn(name, f"failed at step {step} and is off for the rest of the run", error)
                with suppress(Exception):
                    writer.close()

    def close(self) -> None:
        """Close each writer, whatever the others do. A second call does nothing."""
        while self.writers:
            name, writer = self.writers.popitem()
            try:
                writer.close()
            except Exception as error:
                self._warn(name, "could not send everything", error)

    def _warn(self, name: str, what: str, error: Exception) -> None:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        self.notice(f"writer {name} {what}: {reason}. metrics.jsonl has every value.")


def start_writers(builders: Mapping[str, Callable[[], Writer]], notice: Callable[[str], None]) -> WriterSet:
    """Start every writer now, not at the first record; if one cannot, close those that did.

    Raises:
        ForgeError: a writer that the configuration asks for cannot start; names it and the reason.
    """
    started = WriterSet({}, notice)
    for name, build in builders.items():
        try:
            started.writers[name] = build()
        except Exception as error:
            started.close()
            if isinstance(error, ForgeError):
                raise
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ForgeError(
                f"writer {name} cannot start: {reason}",
                f"see [metrics.{name}], or leave it out of metrics.writers",
            ) from error
    return started


def load_package(writer: str, module: str) -> Any:
    """The module a writer needs. Raises ForgeError with the line that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ForgeError(f"writer {writer} cannot be loaded: {error}", install_hint(writer)) from error


def resolved_config(run: Path) -> dict[str, Any]:
    """The configuration that a run folder keeps in config.toml; empty if there is none that parses."""
    try:
        return tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested tables as ("table.key", value); lists of tables count from 0."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from flatten(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree):
        for index, item in enumerate(tree):
            yield from flatten(item, f"{prefix}.{index}")
    else:
        yield prefix, tree


def remember(path: Path, facts: Mapping[str, str]) -> None:
    """Keep what a later start needs to go on with the same remote run."""
    path.write_text(json.dumps(dict(facts)) + "\n", encoding="utf-8")


def recall(path: Path) -> dict[str, str]:
    """What `remember` kept; empty if there is nothing readable."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in facts.items()} if isinstance(facts, dict) else {}
