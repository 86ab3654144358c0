"""The first run of one's own, as the README and the first page of the manual tell it, has no problems."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(?:^(?:    .*)?\n)+", re.MULTILINE)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_a_first_run_of_ones_own_has_no_problems(page: str, tmp_path: Path) -> None:
    blocks = [textwrap.dedent(block).strip() for block in BLOCK.findall((ROOT / page).read_text())]
    (text,) = [block for block in blocks if block.startswith("# own.toml")]
    (tmp_path / "texts").mkdir()
    (tmp_path / "own.toml").write_text(text)
    command = [sys.executable, "-m", "forge_core", "check", "own.toml"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert checked.returncode == 0, checked.stderr
