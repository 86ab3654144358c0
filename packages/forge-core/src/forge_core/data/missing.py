"""Files and folders of data that are not there, found without reading any. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from forge_core.config.config import Config
from forge_core.config.tables import DataConfig, EvalConfig
from forge_core.errors import Problem
from forge_core.files import is_there


def missing_paths(
    config: Config, sources: Collection[str], there: Callable[[str], bool] = is_there
) -> Iterator[Problem]:
    """What `data`, its mixture and `eval.sets` name that is not there.

    Args:
        config: resolved.
        sources: kinds whose path is a file or a folder, as users write them.
        there: whether there is one at a path.
    """
    for key, _, path in named_paths(config, sources):
        if not there(path):
            yield Problem(key, f"there is no file or folder {path}", at_start=True)


def named_paths(config: Config, sources: Collection[str]) -> Iterator[tuple[str, str, str]]:
    """Key, source and path of what `data`, its mixture and `eval.sets` name; see `missing_paths`."""
    data, sets = config[DataConfig], config[EvalConfig].sets
    named = [("data.path", data.source, data.path)] if not data.mix else []
    named += [(f"data.mix.{i}.path", each.source, each.path) for i, each in enumerate(data.mix)]
    named += [(f"eval.sets.{i}.path", each.source, each.path) for i, each in enumerate(sets)]
    for key, source, path in named:
        if path is not None and source in sources:
            yield key, source, path
