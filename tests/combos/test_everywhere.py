"""What must hold in every combination of installed packages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points, version
from importlib.util import find_spec
from pathlib import Path

import pytest

PACKAGES = sorted(path.name for path in (Path(__file__).parents[2] / "packages").glob("forge-*"))
INSTALLED = [name for name in PACKAGES if find_spec(name.replace("-", "_"))]
OURS = {point.name for point in entry_points(group="forge") if point.dist and point.dist.name in PACKAGES}

SMALL = [
    "--model.dim=32",
    "--model.n_layers=2",
    "--model.n_heads=2",
    "--train.seq_len=32",
    "--train.batch_size=2",
    "--train.max_steps=5",
    "--eval.sample_tokens=0",
    "--eval.steps=1",
    "--metrics.log_interval=1",
    "--run.name=small",
]


def forge(*arguments: str, cwd: Path, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    """Run the command line of an environment, by default of this one."""
    command = [python, "-m", "forge_core", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=100)


def test_all_packages_are_of_one_release() -> None:
    assert len({version(name) for name in INSTALLED}) == 1


def test_each_family_brings_one_plugin() -> None:
    families = [name for name in INSTALLED if name != "forge-core"]
    assert len(OURS) == len(families)


def test_plugins_lists_what_is_installed_and_all_of_it_works(tmp_path: Path) -> None:
    listing = forge("plugins", "--json", cwd=tmp_path)
    assert listing.returncode == 0, listing.stderr
    states = {row["name"]: row["state"] for row in json.loads(listing.stdout)["plugins"]}
    assert {name: states.get(name) for name in OURS} == dict.fromkeys(OURS, "works")


def test_nothing_is_loaded_where_nothing_is_named(tmp_path: Path) -> None:
    checked = forge("check", "quickstart", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    assert "plugins: none" in checked.stdout


def losses(folder: Path, python: str) -> list[tuple[int, float]]:
    """Step and loss of a small run that names nothing; JSON keeps every bit of a float."""
    folder.mkdir()
    trained = forge("train", "quickstart", *SMALL, cwd=folder, python=python)
    assert trained.returncode == 0, trained.stderr
    rows = [json.loads(line) for line in (folder / "runs/small/metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]


def test_what_is_installed_but_not_named_changes_no_bit(tmp_path: Path) -> None:
    alone = os.environ.get("FORGE_CORE_ALONE_PYTHON")
    if alone is None:
        pytest.skip("needs an environment with core alone; the sessions of noxfile.py have one")
    here = losses(tmp_path / "here", sys.executable)
    assert len(here) == 5
    assert here == losses(tmp_path / "alone", alone)
