"""Virtual environments for the sessions of noxfile.py, which share one installation of torch.

Installing torch takes most of a minute and about a gigabyte, and the tests need an environment for each
combination of packages. So there is one real environment, and the others are layers that see it:

    runtime              what forge-core declares as its dependencies, and nothing else
    tools                over runtime: test and lint tools (the `dev` group), dependencies of the families
    core, core+moe, ...  over tools: the packages of one combination, installed from the checkout
    clean-...            over runtime: wheels, with what they declare; an undeclared dependency fails there

A layer sees those below it by a `.pth` file. Its own site-packages come first, and pip, when run in it,
counts what lies below as installed. An environment is made anew when what it was made from changes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / "packages"
HOME = ROOT / ".nox" / "environments"
CONSTRAINTS = ROOT / "constraints.txt"
STAMP = "ingredients.stamp"

Run = Callable[..., Any]
"""`run(*command, **options)` as `nox.Session.run`: runs a command, raises if it fails."""


class Environment:
    """A virtual environment at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def python(self) -> str:
        return self.script("python")

    def script(self, name: str) -> str:
        """Path of an installed command."""
        return str(self.path / ("Scripts" if os.name == "nt" else "bin") / name)

    @property
    def site_packages(self) -> Path:
        if os.name == "nt":
            return self.path / "Lib" / "site-packages"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        return self.path / "lib" / version / "site-packages"

    def pip_install(self, run: Run, *arguments: str) -> None:
        """Install in the versions of constraints.txt; a bare range of torch would fetch another build."""
        constraint = ["--constraint", str(CONSTRAINTS)]
        run(self.python, "-m", "pip", "install", "-qq", *constraint, *arguments, external=True)

    def is_made_from(self, ingredients: Iterable[str]) -> bool:
        stamp = self.path / STAMP
        return stamp.exists() and stamp.read_text() == _digest(ingredients)

    def made_from(self, ingredients: Iterable[str]) -> None:
        (self.path / STAMP).write_text(_digest(ingredients))


def packages() -> list[str]:
    """The installable packages, forge-core first; derived from the folders in packages/."""
    names = sorted(path.parent.name for path in PACKAGES.glob("forge-*/pyproject.toml"))
    return sorted(names, key=lambda name: name != "forge-core")


def examples() -> list[str]:
    """The plugins in examples/, such as a stranger could have written."""
    return sorted(path.parent.name for path in (ROOT / "examples").glob("*/pyproject.toml"))


def folder(name: str) -> Path:
    """Where a package or an example lies."""
    return next(path for path in (PACKAGES / name, ROOT / "examples" / name) if path.exists())


def project(name: str) -> dict[str, Any]:
    """The `[project]` table of a package or an example."""
    with (folder(name) / "pyproject.toml").open("rb") as file:
        table: dict[str, Any] = tomllib.load(file)["project"]
    return table


def third_party(names: Iterable[str]) -> list[str]:
    """Declared dependencies of packages on anything but packages of this repository."""
    declared = [requirement for name in names for requirement in project(name)["dependencies"]]
    return [requirement for requirement in declared if not requirement.startswith("forge-")]


def needed(example: str) -> list[str]:
    """The packages of this repository that an example declares, itself last."""
    declared = " ".join(project(example)["dependencies"])
    return [*(name for name in packages() if name in declared), example]


def runtime(run: Run) -> Environment:
    """The environment with torch: what forge-core declares, in the versions of constraints.txt."""
    requirements = third_party(["forge-core"])
    return _make(run, "runtime", [], lambda made: made.pip_install(run, *requirements), requirements)


def tools(run: Run) -> Environment:
    """The layer with the development tools."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        requirements = [
            *tomllib.load(file)["dependency-groups"]["dev"],
            *third_party([*packages(), *examples()]),
        ]
    return _make(
        run, "tools", [runtime(run)], lambda made: made.pip_install(run, *requirements), requirements
    )


def combination(run: Run, names: Sequence[str]) -> Environment:
    """A layer with some packages of the checkout and no others; edits of the sources show at once."""
    ingredients = [path.read_text() for name in names for path in _metadata_sources(name)]
    layers = [runtime(run), tools(run)]
    label = "+".join(name.removeprefix("forge-") for name in names)
    return _make(run, label, layers, lambda made: install_checkout(run, made, names), ingredients)


def develop(run: Run) -> Environment:
    """All packages of the checkout in .venv, beside nox; with the tools, once those are made."""
    environment = Environment(ROOT / ".venv")
    ingredients = [path.read_text() for name in packages() for path in _metadata_sources(name)]
    if not environment.path.exists():
        run(sys.executable, "-m", "virtualenv", "--quiet", str(environment.path), external=True)
    link(environment, [runtime(run), Environment(HOME / "tools")])
    if not environment.is_made_from(ingredients):
        environment.pip_install(run, "hatchling", "editables")
        install_checkout(run, environment, packages())
        environment.made_from(ingredients)
    return environment


def clean(run: Run, name: str, wheels: Sequence[Path]) -> Environment:
    """A new layer over runtime with the given wheels and whatever they declare beyond it."""
    shutil.rmtree(HOME / f"clean-{name}", ignore_errors=True)
    install = [str(wheel) for wheel in wheels]
    return _make(run, f"clean-{name}", [runtime(run)], lambda made: made.pip_install(run, *install), install)


def install_checkout(run: Run, environment: Environment, names: Iterable[str]) -> None:
    """Install packages of the checkout, editable, without looking at their dependencies."""
    editable = [part for name in names for part in ("--editable", str(folder(name)))]
    environment.pip_install(run, "--no-deps", "--no-build-isolation", *editable)


def link(environment: Environment, layers: Iterable[Environment]) -> None:
    """Let `environment` see what is installed in `layers`, after what is its own."""
    lines = "".join(f"{layer.site_packages}\n" for layer in layers)
    (environment.site_packages / "forge_layers.pth").write_text(lines)


def _make(
    run: Run,
    name: str,
    layers: Sequence[Environment],
    install: Callable[[Environment], None],
    ingredients: Iterable[str],
) -> Environment:
    made = Environment(HOME / name)
    everything = [*ingredients, str(made.path), sys.version, CONSTRAINTS.read_text()]
    everything += [(layer.path / STAMP).read_text() for layer in layers]
    if made.is_made_from(everything):
        return made
    shutil.rmtree(made.path, ignore_errors=True)
    takes = ", which has torch: about a minute where the network is fast" if not layers else ""
    print(f"making the environment {name}{takes}", flush=True)
    run(sys.executable, "-m", "virtualenv", "--quiet", "--no-setuptools", str(made.path), external=True)
    link(made, layers)
    install(made)
    made.made_from(everything)
    return made


def _metadata_sources(name: str) -> list[Path]:
    """The files that an editable installation copies from, and so goes stale with."""
    return [folder(name) / "pyproject.toml", *folder(name).glob("src/*/version.py")]


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
