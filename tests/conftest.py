"""Which tests run where: folders of installed packages, and combination tests in their own combination."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest_plugins = ["forge_core.testing.fixtures"]

FOLDERS = (Path(__file__).parents[1] / "packages").glob("forge-*")
PACKAGES = sorted(path.name.removeprefix("forge-") for path in FOLDERS)
INSTALLED = frozenset(name for name in PACKAGES if find_spec(f"forge_{name}"))

collect_ignore = [name for name in PACKAGES if name not in INSTALLED]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests marked `packages(...)` that belong elsewhere.

    They need all packages that they name. Where the sessions of noxfile.py say which combination this is,
    they run in exactly theirs, so that each runs once in the matrix. Unmarked tests run in every combination,
    but those in the folder of a family only where it stands alone.
    """
    stated = os.environ.get("FORGE_TEST_PACKAGES")
    here = None if stated is None else frozenset(stated.split("+")) - {"core"}
    if here is not None and here | {"core"} != INSTALLED:
        raise pytest.UsageError(f"installed are {sorted(INSTALLED)}, not {stated}")
    kept = [item for item in items if _belongs(item, here)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def _belongs(item: pytest.Item, here: frozenset[str] | None) -> bool:
    marker = item.get_closest_marker("packages")
    if marker is None:
        return here is None or len(here) < 2 or item.path.parent.name not in PACKAGES
    needed = frozenset(marker.args)
    return needed <= INSTALLED if here is None else needed == here
