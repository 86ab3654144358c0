"""What is committed makes sense to whoever has only this repository."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UNREADABLE = {".png", ".jpg", ".gif", ".ico", ".bin", ".npy", ".safetensors", ".parquet", ".gz", ".mp4"}

OUTSIDE = {
    "host of a package registry": re.compile(
        r"pypi\.org|pythonhosted|download\.pytorch|conda\.anaconda|npmjs", re.I
    ),
    "path of one machine": re.compile(
        r"(?<![\w.~}])/(?:work|root|farm|opt/wheels|home/\w+)(?:/|\b(?![-\w]))"
    ),
    "number of an issue": re.compile(
        r"\bissues?\s*(?:#|no\.?|number)?\s*\d+\b|\b(?:fixes|closes|refs?|see)\s+#\d+", re.I
    ),
    "identifier of a list kept elsewhere": re.compile(r"\b(?!ISO|RFC|PEP)[A-Z]{2}-\d{2}\b"),
}


def tracked() -> list[Path]:
    listing = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True
    )
    if listing.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listing.stdout.split("\0") if name]
    return [
        path for path in paths if path.is_file() and path.suffix not in UNREADABLE and path.name != "LICENSE"
    ]


@pytest.mark.parametrize("what", OUTSIDE)
def test_tracked_files_name_nothing_outside(what: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if path != Path(__file__) and OUTSIDE[what].search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("host of a package registry", "see https://pypi" + ".org/simple"),
        ("path of one machine", "cd /work/main"),
        ("path of one machine", "/root/.cache"),
        ("number of an issue", "as issue #12 says"),
        ("number of an issue", "fixes #7"),
        ("identifier of a list kept elsewhere", "covers GA-01"),
    ],
)
def test_the_patterns_find_what_they_are_for(what: str, text: str) -> None:
    assert OUTSIDE[what].search(text)
