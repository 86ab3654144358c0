"""Packages with plugins, written to temporary folders as an installer would leave them."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs


@attrs.frozen
class Package:
    """A distribution in a folder of its own, which has to be on sys.path to count as installed."""

    folder: Path
    module: str

    def text(self) -> str:
        return (self.folder / f"{self.module}.py").read_text()


def package(
    where: Path, plugin: str, source: str, *, distribution: str = "", module: str = "", version: str = "1.0"
) -> Package:
    """Write a distribution whose one module holds `source` and is the plugin `plugin`."""
    distribution = distribution or f"dist-{plugin}"
    module = module or f"module_of_{distribution.replace('-', '_')}"
    folder = where / distribution
    metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(f"[forge]\n{plugin} = {module}\n")
    (folder / f"{module}.py").write_text(textwrap.dedent(source))
    return Package(folder, module)


@contextmanager
def installed(packages: Iterable[Package]) -> Iterator[None]:
    """Have these packages in front of sys.path, in the given order, and their modules not imported."""
    packages = list(packages)
    before = list(sys.path)
    for one in packages:
        sys.modules.pop(one.module, None)
    sys.path[:0] = [str(one.folder) for one in packages]
    try:
        yield
    finally:
        sys.path[:] = before
        for one in packages:
            sys.modules.pop(one.module, None)
