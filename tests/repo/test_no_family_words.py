"""The core names no family: what it cannot name it cannot depend on."""

from __future__ import annotations

import re
from pathlib import Path

CORE = Path(__file__).parents[2] / "packages" / "forge-core" / "src"
FAMILY = re.compile(
    r"vlm|\bmoe\b|expert|video|\bvision|pipelining|pipeline.?(parallel|stage|schedule)", re.IGNORECASE
)


def test_core_sources_name_no_family() -> None:
    found = [
        f"{path.relative_to(CORE)}:{number}: {line.strip()}"
        for path in sorted(CORE.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if FAMILY.search(line)
    ]
    assert not found, "\n".join(found)


def test_the_pattern_finds_what_it_is_for() -> None:
    for text in (
        "import forge_vlm",
        "if cfg.moe:",
        "num_experts",
        "pipeline_parallel",
        "PipelineSchedule",
        "vision tower",
    ):
        assert FAMILY.search(text), text
    for text in ("data pipeline", "revision", "division", "moebius"):
        assert not FAMILY.search(text), text
