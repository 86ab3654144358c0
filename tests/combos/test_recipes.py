"""Every recipe of this repository is found by its name, has nothing wrong with it, and runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2] / "packages"
RECIPES = sorted(PACKAGES.glob("forge-*/src/*/recipes/*.toml"))


def in_its_own_package(path: Path) -> object:
    """A test case for the combination of the core with the package that ships the recipe."""
    package = path.parents[1].name
    family = [] if package == "forge_core" else [package.removeprefix("forge_")]
    return pytest.param(path, id=path.stem, marks=pytest.mark.packages(*family))


each_recipe = pytest.mark.parametrize("path", [in_its_own_package(path) for path in RECIPES])


def forge(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "forge_core", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=110)


def test_there_is_a_quickstart() -> None:
    assert "quickstart" in {path.stem for path in RECIPES}


@each_recipe
def test_recipe_says_what_it_is(path: Path) -> None:
    assert path.read_text().startswith("# ")


def processes(path: Path) -> int:
    """How many a recipe needs: the command in its comment says it where that is not one."""
    said = re.search(r"--nproc (\d+)", path.read_text())
    return int(said.group(1)) if said else 1


@each_recipe
def test_recipe_has_no_problems(path: Path, tmp_path: Path) -> None:
    checked = forge("check", path.stem, f"--world-size={processes(path)}", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr


@each_recipe
def test_recipe_runs(path: Path, tmp_path: Path) -> None:
    several = ["--nproc", str(processes(path))] if processes(path) > 1 else []
    trained = forge("train", path.stem, "--train.max_steps=2", "--run.name=two", *several, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert (tmp_path / "runs" / "two" / "metrics.jsonl").stat().st_size
