"""Parts of a model that sees of somebody else's, as docs/vlm.md writes them, cut into stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from forge_core.testing.pool import WorkerPool

pytestmark = [pytest.mark.packages("pp", "vlm"), pytest.mark.slow]


def test_parts_of_the_page_in_stages(pool2: WorkerPool, tmp_path: Path) -> None:
    from vlmkit import mixed_records, write_samples
    from vlmparts import run_with_parts, tables_of_parts, write_package

    package = write_package(tmp_path / "forge-glance")
    folder = tmp_path / "samples"
    folder.mkdir()
    write_samples(folder, mixed_records(40))
    expected = run_with_parts(package, tables_of_parts(folder, 1, 2))
    for found in pool2.run(run_with_parts, package, tables_of_parts(folder, 1, 2, pp={"size": 2})):
        for name in ("losses", "norms", "eval", "length"):
            assert found[name] == pytest.approx(expected[name], rel=1e-9), name
