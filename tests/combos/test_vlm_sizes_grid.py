"""Packed patches, clips and tiles with every way to train: weights of the plain run at the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forge_core.testing.pool import WorkerPool

pytestmark = [
    pytest.mark.packages("moe", "vlm"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
MOE: dict[str, Any] = {"num_experts": 4, "top_k": 2, "expert_hidden_dim": 24}
COMPILED: dict[str, Any] = {"compile": True, "compile_backend": "aot_eager"}
PACKING: dict[str, Any] = {"data": {"vlm/images": {"pack": True}}, "train": {"seq_len": 80}}
WAYS: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "accumulated": (1, 2, {}, {}),
    "tp 2": (1, 1, {}, {"distributed": {"tp": 2, "sequence_parallel": False}}),
    "cp 2": (1, 1, {}, {"distributed": {"cp": 2}}),
    "moe, ep 2": (2, 1, {"moe": MOE}, {"moe": {**MOE, "ep": 2}}),
    "packing": (2, 1, PACKING, {}),
    "checkpointing": (1, 1, {}, {"train": {"activation_checkpointing": "full"}}),
    "compile": (1, 1, {}, {"train": COMPILED}),
}
"""By name: data ranks, micro-batches, what the plain run has as well, and what this one has alone."""
DAILY = {("packed", "cp 2"), ("packed", "packing"), ("tiled", "checkpointing")}
PLAIN: dict[tuple[str, str], dict[str, Any]] = {}


def cells() -> list[Any]:
    found = []
    for way in WAYS:
        for kind in ("packed", "clips", "tiled"):
            marks = () if (kind, way) in DAILY else (pytest.mark.combos,)
            found.append(pytest.param(kind, way, id=f"{kind}-{way}", marks=marks))
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    from vlmsizes import write_moving, write_sizes

    sizes = write_sizes(tmp_path_factory.mktemp("sizes"))
    return {"packed": sizes, "tiled": sizes, "clips": write_moving(tmp_path_factory.mktemp("clips"))}


@pytest.mark.timeout(300)  # compiling takes its time on a busy machine
@pytest.mark.parametrize(("kind", "way"), cells())
def test_a_cell_equals_the_plain_run(
    pool2: WorkerPool, folders: dict[str, Path], kind: str, way: str
) -> None:
    from vlmkit import merged
    from vlmruns import of, run, same
    from vlmsizes import CLIPS, PACKED, TILED

    ranks, accumulate, shared, own = WAYS[way]
    base = merged({"packed": PACKED, "clips": CLIPS, "tiled": TILED}[kind], {"train": {"seq_len": 40}})
    plain = merged(base, shared)
    key = (kind, repr(shared))
    if key not in PLAIN:
        PLAIN[key] = run(of(folders[kind], **plain))
    mine = of(folders[kind], ranks, accumulate, **merged(plain, own))
    processes = max(ranks, *own.get("distributed", {}).values(), 1)
    found = pool2.run(run, mine, timeout=280) if processes > 1 else [run(mine)]
    for each in found:
        same(each, PLAIN[key])
