"""Sessions: `nox -s NAME`, or `python3 bootstrap.py NAME` where there is no nox yet.

The environments are layers over one installation of torch (scripts/environments.py says how), so the sessions
make their own and nox makes none. What is tested is derived from the folders in packages/ and tests/.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))

import environments  # noqa: E402  (scripts/ is no package)

nox.needs_version = ">=2024.3.2"
nox.options.default_venv_backend = "none"
nox.options.sessions = ["tests", "lint", "types"]

DIST = ROOT / "dist"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
CHECKED = ["packages", "tests", "scripts", "benchmarks", "examples", "noxfile.py", "bootstrap.py"]


def combinations() -> list[tuple[str, ...]]:
    """Core alone, core with each family, with each pair of families, and everything."""
    core, *families = environments.packages()
    sizes = sorted({0, 1, 2, len(families)})
    chosen = itertools.chain.from_iterable(itertools.combinations(families, size) for size in sizes)
    return [(core, *some) for some in chosen]


def label(names: tuple[str, ...]) -> str:
    """`core+moe+pp` for forge-core, forge-moe and forge-pp."""
    return "+".join(name.removeprefix("forge-") for name in names)


def targets(names: tuple[str, ...]) -> list[str]:
    """The test folders for a combination: each package's own and combos/. Of a family that does not stand
    alone only the tests run that name the combination, see tests/conftest.py."""
    own = [name.removeprefix("forge-") for name in names[1:] or names]
    once = ["repo", "golden"] if len(names) == 1 else []
    folders = (f"tests/{name}" for name in [*own, *once, "combos"])
    return [folder for folder in folders if any((ROOT / folder).glob("**/test_*.py"))]


def workers() -> str:
    """One test process a core; tests run on one thread each."""
    return str(min(os.cpu_count() or 1, 8))


def run_pytest(
    session: nox.Session, names: tuple[str, ...], *arguments: str, may_be_empty: bool = False
) -> None:
    """Run pytest where exactly these packages are installed."""
    environment = environments.combination(session.run, names)
    alone = environments.combination(session.run, names[:1])
    variables = {**ONE_THREAD, "FORGE_TEST_PACKAGES": label(names), "FORGE_CORE_ALONE_PYTHON": alone.python}
    # 5: nothing was selected, which a selection on the command line may well do in some combinations.
    success = [0, 5] if session.posargs or may_be_empty else [0]
    command = [environment.python, "-m", "pytest", "--durations=8", *arguments, *session.posargs]
    session.run(*command, env=variables, external=True, success_codes=success)


@nox.session
@nox.parametrize("names", [nox.param(names, id=label(names)) for names in combinations()])
def tests(session: nox.Session, names: tuple[str, ...]) -> None:
    """Each package's tests where it stands alone, and `tests/combos` everywhere; or the paths after `--`.

    What takes long, tests marked `slow` or `combos`, is left to the session `combos`.
    """
    if any(word.startswith("tests/") for word in session.posargs):
        run_pytest(session, names)
        return
    folders = targets(names)
    parallel = ["-n", workers(), "--dist", "loadfile"] if len(folders) > 1 else []
    run_pytest(session, names, "-m", "not combos and not slow and not alone", *parallel, *folders)
    if parallel and len(names) <= 2:  # where a folder stands alone, as all that is marked so does
        run_pytest(session, names, "-m", "alone and not combos and not slow", *folders, may_be_empty=True)


@nox.session
@nox.parametrize("name", [nox.param(name, id=name) for name in environments.examples()])
def examples(session: nox.Session, name: str) -> None:
    """Each plugin of examples/ with its own tests, where it and what it declares are installed."""
    environment = environments.combination(session.run, environments.needed(name))
    tests = str(environments.folder(name).relative_to(ROOT))
    session.run(environment.python, "-m", "pytest", tests, *session.posargs, env=ONE_THREAD, external=True)


@nox.session
@nox.parametrize("names", [nox.param(names, id=label(names)) for names in combinations()])
def combos(session: nox.Session, names: tuple[str, ...]) -> None:
    """The full grid of combinations, of which `tests` runs a slice, and the slow tests of each package."""
    run_pytest(session, names, "-m", "combos or slow", *targets(names), may_be_empty=True)


@nox.session
def quickstart(session: nox.Session) -> None:
    """Train the recipe `quickstart` with the packages of this checkout, installed into .venv."""
    forge = environments.develop(session.run).script("forge")
    # Threads that wait for each other in a loop fall to a tenth of the speed when another program takes a
    # core. Those that sleep meanwhile keep half of it, and lose a tenth on an idle machine.
    patient = {"OMP_WAIT_POLICY": "PASSIVE"}
    session.run(forge, "train", *session.posargs, env=patient, external=True)


@nox.session
def dev(session: nox.Session) -> None:
    """Put the packages of this checkout and the development tools into .venv."""
    environments.tools(session.run)
    environment = environments.develop(session.run)
    session.log(f"python -m pytest, python -m mypy and the rest: {environment.python}")


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, as linter and as formatter; `-- --fix` mends what can be mended."""
    ruff = [environments.tools(session.run).script("ruff")]
    paths = existing(CHECKED)
    fix = "--fix" in session.posargs
    session.run(*ruff, "check", *(["--fix"] if fix else []), *paths, external=True)
    session.run(*ruff, "format", *([] if fix else ["--check"]), *paths, external=True)


@nox.session
def types(session: nox.Session) -> None:
    """mypy, strict, over the packages and the scripts."""
    tools = environments.tools(session.run)
    sources = [str(path.relative_to(ROOT)) for path in ROOT.glob("packages/forge-*/src/*/")]
    session.run(
        tools.python, "-m", "mypy", *sorted(sources), "scripts", "noxfile.py", "bootstrap.py", external=True
    )


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site into site/; a broken link or a page outside the navigation fails."""
    everything = environments.combination(session.run, environments.packages())
    session.run(
        everything.python, "-m", "mkdocs", "build", "--strict", "--quiet", *session.posargs, external=True
    )


@nox.session
def build(session: nox.Session) -> None:
    """Build every wheel, install each into an environment with only what it declares, and use it there."""
    core, *families = environments.packages()
    shutil.rmtree(DIST, ignore_errors=True)
    wheels = {name: build_wheel(session, name) for name in (core, *families)}
    for name in (core, *families):
        clean = environments.clean(session.run, name, [wheels[core], wheels[name]])
        session.run(clean.python, "scripts/import_everything.py", name, external=True)
        session.run(clean.python, "-m", "pip", "check", external=True)
        if name == core:
            use(session, clean)
    use(session, environments.clean(session.run, "all", list(wheels.values())))


def build_wheel(session: nox.Session, name: str) -> Path:
    """The wheel of a package in dist/, with its source distribution; every file of the package is in it."""
    tools = environments.tools(session.run)
    with session.chdir(environments.PACKAGES / name):
        session.run(
            tools.python, "-m", "hatchling", "build", "--directory", str(DIST), external=True, silent=True
        )
    (wheel,) = DIST.glob(f"{name.replace('-', '_')}-*.whl")
    source = environments.PACKAGES / name / "src"
    wanted = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    missing = sorted(
        path for path in wanted - set(zipfile.ZipFile(wheel).namelist()) if "__pycache__" not in path
    )
    if missing:
        session.error(f"{wheel.name} lacks {', '.join(missing)}")
    return wheel


def use(session: nox.Session, environment: environments.Environment) -> None:
    """What a user does first, away from the checkout."""
    forge = environment.script("forge")
    few_steps = ["--train.max_steps=3", "--run.name=three"]
    with tempfile.TemporaryDirectory() as folder, session.chdir(folder):
        for arguments in (
            ["--help"],
            ["plugins"],
            ["check", "quickstart"],
            ["train", "quickstart", *few_steps],
        ):
            session.run(forge, *arguments, external=True)


@nox.session
def bench(session: nox.Session) -> None:
    """Run benchmarks/: `-- loop --check` runs loop.py with that flag, no name runs them all."""
    named = [word for word in session.posargs if not word.startswith("-")]
    flags = [word for word in session.posargs if word.startswith("-")]
    python = environments.combination(session.run, tuple(environments.packages())).python
    scripts = [ROOT / "benchmarks" / f"{name}.py" for name in named]
    for script in scripts or sorted((ROOT / "benchmarks").glob("[a-z]*.py")):
        session.run(python, str(script), *flags, external=True)


def existing(paths: list[str]) -> list[str]:
    """Those of `paths` that this checkout has."""
    return [path for path in paths if (ROOT / path).exists()]
