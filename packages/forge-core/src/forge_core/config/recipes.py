"""Recipes: configurations that packages ship, found by name without importing the packages."""

from __future__ import annotations

from functools import cache
from importlib import util
from importlib.metadata import EntryPoint, entry_points
from itertools import takewhile
from pathlib import Path

from forge_core.errors import UsageError

GROUP = "forge.recipes"


def recipe_names() -> list[str]:
    """Names of all installed recipes, sorted."""
    return sorted(_recipes())


def find_recipe(name: str) -> Path | None:
    """The file of a recipe, or None. UsageError if two packages ship a recipe of that name."""
    paths = _recipes().get(name, ())
    if len(paths) > 1:
        raise UsageError(
            f"{len(paths)} packages ship a recipe called {name!r}",
            "give one path: " + ", ".join(map(str, paths)),
        )
    return paths[0] if paths else None


def describe(path: Path) -> str:
    """The comment that a recipe begins with, on one line; "" without one, or if it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return ""
    return " ".join(line[1:].strip() for line in takewhile(lambda line: line.startswith("#"), lines))


def recipe_files() -> dict[str, tuple[Path, ...]]:
    """The file of every recipe by name, sorted; several where packages ship one of the same name."""
    return dict(sorted(_recipes().items()))


@cache
def _recipes() -> dict[str, tuple[Path, ...]]:
    found: dict[str, list[Path]] = {}
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, point.value)):
        for folder in _folders(point):
            for file in sorted(folder.glob("*.toml")):
                paths = found.setdefault(file.stem, [])
                if file not in paths:
                    paths.append(file)
    return {name: tuple(paths) for name, paths in found.items()}


def _folders(point: EntryPoint) -> list[Path]:
    """Folders of the package that an entry point names; only its top package is looked up, none imported."""
    top, *below = point.value.split(".")
    try:
        spec = util.find_spec(top)
    except (ImportError, ValueError):
        return []
    places = [] if spec is None else spec.submodule_search_locations or []
    return [folder for place in places if (folder := Path(place).joinpath(*below)).is_dir()]
