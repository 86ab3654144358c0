"""Prepare a release: `python3 scripts/release.py 2027.1.0`.

Writes the version into every package and makes a section of CHANGELOG.md from the fragments in changes/,
which it removes. It commits nothing.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("added", "changed", "deprecated", "removed", "fixed")
VERSION = re.compile(r"20\d\d\.(?:[1-9]|1[0-2])\.\d+")


def main(arguments: list[str]) -> int:
    """Release the version given as the only argument; returns 2 if it is none."""
    if len(arguments) != 1 or not VERSION.fullmatch(arguments[0]):
        print("usage: python3 scripts/release.py YYYY.MM.N", file=sys.stderr)
        return 2
    (version,) = arguments
    write_version(ROOT, version)
    gather(ROOT, version)
    return 0


def write_version(root: Path, version: str) -> None:
    """Put `version` into every version.py, and its month into what families ask of the core."""
    month = version.rpartition(".")[0]
    for path in root.glob("packages/forge-*/src/*/version.py"):
        _replace(path, r'^__version__ = ".*"$', f'__version__ = "{version}"')
    for path in root.glob("packages/forge-*/pyproject.toml"):
        _replace(path, r'"forge-core>=[0-9.]+"', f'"forge-core>={month}"')


def gather(root: Path, version: str) -> None:
    """Move the fragments into a new section at the top of CHANGELOG.md, by kind and then by name."""
    lines = [f"## {version}"]
    for kind in KINDS:
        fragments = sorted((root / "changes").glob(f"*.{kind}.md"))
        if fragments:
            lines += ["", f"### {kind.capitalize()}", ""]
            lines += [f"- {' '.join(fragment.read_text().split())}" for fragment in fragments]
        for fragment in fragments:
            fragment.unlink()
    changelog = root / "CHANGELOG.md"
    head, mark, older = changelog.read_text().partition("\n## ")
    changelog.write_text(head.rstrip() + "\n\n" + "\n".join(lines) + "\n" + mark + older)


def _replace(path: Path, pattern: str, by: str) -> None:
    path.write_text(re.sub(pattern, by, path.read_text(), flags=re.MULTILINE))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
