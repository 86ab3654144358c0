"""Every package is laid out, versioned, licensed and declared alike."""

from __future__ import annotations

import os
import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(path.parent for path in ROOT.glob("packages/forge-*/pyproject.toml"))
FAMILIES = [folder for folder in FOLDERS if folder.name != "forge-core"]
CALVER = re.compile(r"20\d\d\.(?:[1-9]|1[0-2])\.\d+")

each_package = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
each_family = pytest.mark.parametrize("folder", FAMILIES, ids=lambda folder: folder.name)


def pyproject(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def source(folder: Path) -> Path:
    return folder / "src" / folder.name.replace("-", "_")


def version(folder: Path) -> str:
    found = re.search(r'^__version__ = "(.*)"$', (source(folder) / "version.py").read_text(), re.MULTILINE)
    assert found, folder
    return found[1]


def test_the_five_packages_are_there() -> None:
    assert {folder.name for folder in FOLDERS} >= {
        "forge-core",
        "forge-ckpt",
        "forge-moe",
        "forge-pp",
        "forge-vlm",
    }


def test_versions_are_in_lockstep() -> None:
    versions = {folder.name: version(folder) for folder in FOLDERS}
    assert len(set(versions.values())) == 1, versions
    assert CALVER.fullmatch(version(FOLDERS[0])), versions


@each_package
def test_files_that_every_package_has(folder: Path) -> None:
    for path in (source(folder) / "__init__.py", source(folder) / "py.typed", folder / "README.md"):
        assert path.is_file(), path
    assert (folder / "README.md").read_text().startswith(f"# {folder.name}\n")
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@each_package
def test_declaration(folder: Path) -> None:
    declared = pyproject(folder)
    project = declared["project"]
    assert declared["build-system"]["build-backend"] == "hatchling.build"
    assert project["name"] == folder.name
    assert project["requires-python"] == ">=3.11"
    assert project["license"] == "Apache-2.0"
    assert project["dynamic"] == ["version"]
    assert declared["tool"]["hatch"]["version"]["path"] == f"src/{source(folder).name}/version.py"


@each_family
def test_a_family_is_one_plugin_over_the_core(folder: Path) -> None:
    project = pyproject(folder)["project"]
    year_and_month = ".".join(version(folder).split(".")[:2])
    assert f"forge-core>={year_and_month}" in project["dependencies"]
    (target,) = project["entry-points"]["forge"].values()
    module = target.partition(":")[0]
    assert module.partition(".")[0] == source(folder).name
    assert (folder / "src" / Path(*module.split("."))).with_suffix(".py").is_file()


def test_plugins_have_the_names_of_their_tables() -> None:
    names = {folder.name: list(pyproject(folder)["project"]["entry-points"]["forge"]) for folder in FAMILIES}
    expected = {folder.name: [folder.name.removeprefix("forge-")] for folder in FAMILIES}
    assert names == {**expected, "forge-ckpt": ["checkpoint"]}


def test_nothing_is_installed_without_constraints() -> None:
    dependencies = [entry for folder in FOLDERS for entry in pyproject(folder)["project"]["dependencies"]]
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    pinned = set(re.findall(r"^([a-z0-9-]+)==[0-9.]+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    named = {re.match(r"[a-z0-9-]+", entry)[0] for entry in [*dependencies, *groups["dev"]]}  # type: ignore[index]
    assert {name for name in named if not name.startswith("forge-")} <= pinned


@pytest.mark.skipif("FORGE_TEST_PACKAGES" not in os.environ, reason="not in an environment of noxfile.py")
def test_everything_installed_is_pinned() -> None:
    pinned = set(re.findall(r"^([a-z0-9-]+)==", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    names = {re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower() for found in metadata.distributions()}
    assert {name for name in names if not name.startswith("forge-")} - pinned - {"pip"} == set()


def test_types_are_checked_in_every_package() -> None:
    paths = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["mypy_path"]
    assert {f"packages/{folder.name}/src" for folder in FOLDERS} <= set(paths)
