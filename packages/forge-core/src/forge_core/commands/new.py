"""`forge new`."""

from __future__ import annotations

import argparse
import keyword
import re
import shutil
import tempfile
from pathlib import Path

from forge_core.commands.command import Command
from forge_core.errors import ForgeError, UsageError

NAME = re.compile(r"[a-z][a-z0-9_]*")
MARKER = "newfamily"
"""The name of the template's own family, which rendering replaces; no other word of it contains this one."""
LEFT_OUT = {"__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache"}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", help="name of the plugin and of its table: letters, digits, '_'")
    parser.add_argument("--dir", type=Path, default=Path(), metavar="DIR", help="where to put forge-NAME")


def run(arguments: argparse.Namespace, flags: list[str]) -> int:
    folder = render(arguments.name, arguments.dir)
    name = arguments.name
    print(f"{folder} holds a plugin called {name} that works. Next:\n")
    print(f"  pip install --no-deps --no-build-isolation --editable {folder}")
    print(f"  forge plugins\n  forge train quickstart --{name}=true --train.max_steps=20")
    print(f"  python -m pytest {folder}")
    return 0


def render(name: str, parent: Path) -> Path:
    """Write a package called `forge-NAME` into `parent`; its folder.

    Raises:
        UsageError: the name cannot be used, or the folder is taken.
        ForgeError: it cannot be written. What was begun is removed.
    """
    check_name(name)
    target = parent / f"forge-{name.replace('_', '-')}"
    if target.exists():
        raise UsageError(f"{target} exists already", "choose another name or --dir, or remove it")
    if not parent.is_dir():
        raise UsageError(f"{parent} is not a folder", "make it first, or choose another --dir")
    try:
        with tempfile.TemporaryDirectory(dir=parent, prefix=".forge-new-") as scratch:
            made = Path(scratch) / target.name
            _render_into(made, name)
            made.rename(target)
    except OSError as error:
        raise ForgeError(
            f"cannot write {target}: {error.strerror or error}", "choose another --dir"
        ) from error
    return target


def check_name(name: str) -> None:
    """Raise UsageError where `name` cannot be a plugin's."""
    from forge_core.config.tables import CORE_TABLES
    from forge_core.plugins import CORE, discover

    plain = re.sub(r"\W+", "_", name.removeprefix("forge-").lower()).strip("_")
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        hint = f"for example {plain}" if NAME.fullmatch(plain) and not keyword.iskeyword(plain) else ""
        raise UsageError(f"{name!r} is no name for a table: lower-case letters, digits and '_'", hint)
    if name in CORE_TABLES or name == CORE:
        raise UsageError(f"[{name}] is a table of forge-core", "choose another name")
    for candidate in discover():
        if candidate.name == name:
            raise UsageError(f"a plugin called {name} is installed: {candidate.label}", "choose another name")


def template() -> Path:
    """The folder of the template: in an installed package, or beside it in a checkout.

    Raises:
        ForgeError: neither is there.
    """
    package = Path(__file__).resolve().parents[1]
    for place in (package / "_template", package.parents[2] / "_template"):
        if (place / "pyproject.toml").is_file():
            return place
    raise ForgeError("this installation of forge-core has no template", "install it anew")


def _render_into(folder: Path, name: str) -> None:
    source = template()
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if LEFT_OUT.intersection(relative.parts) or path.suffix == ".pyc" or not path.is_file():
            continue
        target = folder / replaced(relative.as_posix(), name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(replaced(path.read_text(encoding="utf-8"), name), encoding="utf-8")
        shutil.copymode(path, target)


def replaced(text: str, name: str) -> str:
    """The template's text with its family's name, in all its spellings, replaced by `name`."""
    spellings = {
        f"forge-{MARKER}": f"forge-{name.replace('_', '-')}",
        f"forge_{MARKER}": f"forge_{name}",
        "NewFamily": "".join(part.capitalize() for part in name.split("_")),
        MARKER: name,
    }
    for old, new in spellings.items():
        text = text.replace(old, new)
    return text


COMMAND = Command(
    description="Start a package of your own: a plugin with a table, a part of the model, a loss term, a\n"
    "metric and tests, which works as it is and is yours to change. It is written to DIR/forge-NAME.",
    examples="examples:\n  forge new retention\n  forge new my_family --dir ~/src",
    run=run,
    arguments=arguments,
)
