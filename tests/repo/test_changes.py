"""One fragment in changes/ per user-visible change, in the shape that the changelog is made from."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

CHANGES = Path(__file__).parents[2] / "changes"
FRAGMENTS = sorted(path for path in CHANGES.iterdir() if path.name != "README.md")
NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*\.(?:added|changed|deprecated|removed|fixed)\.md")


@pytest.mark.parametrize("path", FRAGMENTS, ids=lambda path: path.name)
def test_fragment(path: Path) -> None:
    assert NAME.fullmatch(path.name), f"{path.name} is not SLUG.KIND.md; changes/README.md lists the kinds"
    text = path.read_text()
    assert text.strip(), "a fragment says what changed"
    assert not text.startswith(("#", "-", "*")), "plain sentences; the changelog adds the list"


def test_a_release_writes_versions_and_gathers_fragments(tmp_path: Path) -> None:
    release = runpy.run_path(str(CHANGES.parent / "scripts" / "release.py"))
    package = tmp_path / "packages" / "forge-moe"
    (package / "src" / "forge_moe").mkdir(parents=True)
    (package / "src" / "forge_moe" / "version.py").write_text('"""Release."""\n\n__version__ = "2026.12.0"\n')
    (package / "pyproject.toml").write_text('dependencies = ["forge-core>=2026.12", "numpy>=1.26"]\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\nHead.\n\n## 2026.12.0\n\n### Fixed\n\n- Old.\n")
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / "README.md").write_text("kept")
    for name, text in {
        "b.fixed.md": "B works\nnow.\n",
        "a.fixed.md": "A works.\n",
        "c.added.md": "C.\n",
    }.items():
        (tmp_path / "changes" / name).write_text(text)

    release["write_version"](tmp_path, "2027.1.0")
    release["gather"](tmp_path, "2027.1.0")

    assert '__version__ = "2027.1.0"' in (package / "src" / "forge_moe" / "version.py").read_text()
    assert (
        package / "pyproject.toml"
    ).read_text() == 'dependencies = ["forge-core>=2027.1", "numpy>=1.26"]\n'
    assert [path.name for path in (tmp_path / "changes").iterdir()] == ["README.md"]
    assert (tmp_path / "CHANGELOG.md").read_text() == (
        "# Changes\n\nHead.\n\n## 2027.1.0\n\n### Added\n\n- C.\n\n### Fixed\n\n- A works.\n- B works now.\n"
        "\n## 2026.12.0\n\n### Fixed\n\n- Old.\n"
    )
