"""Every way to fuse with every way to train: five updates, and the weights of the plain run at the end."""

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
FUSIONS = ("joint", "cross_attention", "mot", "moma", "gated")
OF_BLOCKS = ("mot, biases", "mot, latent", "mot, windows", "moma, latent", "mot, counted apart")
MOE: dict[str, Any] = {"num_experts": 4, "top_k": 2, "expert_hidden_dim": 24}
REMAT: dict[str, Any] = {"activation_checkpointing": "full"}
COMPILED: dict[str, Any] = {"compile": True, "compile_backend": "aot_eager"}
PACKED: dict[str, Any] = {"data": {"vlm/images": {"pack": True}}, "vlm": {"max_images": 4}}
WAYS: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    "plain, accumulated": (1, 2, {}, {}),
    "fsdp 2": (2, 2, {}, {}),
    "replicas 2": (2, 1, {}, {"distributed": {"dp_replicate": 2, "dp_shard": 1}}),
    "tp 2": (1, 1, {}, {"distributed": {"tp": 2, "sequence_parallel": False}}),
    "tp 2, sequence": (1, 1, {}, {"distributed": {"tp": 2}}),
    "cp 2": (1, 1, {}, {"distributed": {"cp": 2}}),
    "cp 2, ring": (1, 1, {}, {"distributed": {"cp": 2, "cp_attention": "ring"}}),
    "moe": (2, 1, {"moe": MOE}, {}),
    "moe, ep 2": (2, 1, {"moe": MOE}, {"moe": {**MOE, "ep": 2}}),
    "packing": (2, 1, PACKED, {}),
    "checkpointing": (1, 1, {}, {"train": REMAT}),
    "compile": (1, 1, {}, {"train": COMPILED}),
    "fsdp 2, checkpointing, compile": (2, 1, {}, {"train": {**REMAT, **COMPILED}}),
}
"""By name: data ranks, micro-batches, what the plain run has as well, and what this one has alone."""
DAILY = {
    ("joint", "compile"),
    ("cross_attention", "cp 2"),
    ("mot", "tp 2"),
    ("mot", "moe"),
    ("moma", "moe, ep 2"),
    ("gated", "tp 2, sequence"),
    ("gated", "packing"),
    ("mot", "checkpointing"),
    ("mot, biases", "tp 2, sequence"),
}
DONE: dict[tuple[str, str], float] = {}
PLAIN: dict[tuple[str, str], dict[str, Any]] = {}


def cells() -> list[Any]:
    """Each fusion in each way; those of every day without a mark."""
    found = []
    for way in WAYS:
        for fusion in (*FUSIONS, *OF_BLOCKS):
            marks = () if (fusion, way) in DAILY else (pytest.mark.combos,)
            found.append(pytest.param(fusion, way, id=f"{fusion}-{way}", marks=marks))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples with one image, two, and none, so that ranks and micro-batches differ in what they see."""
    from vlmkit import mixed_records, write_samples

    return write_samples(tmp_path_factory.mktemp("samples"), mixed_records(40))


@pytest.mark.timeout(300)  # compiling for two processes takes its time on a busy machine
@pytest.mark.parametrize(("fusion", "way"), cells())
def test_a_cell_equals_the_plain_run(pool2: WorkerPool, folder: Path, fusion: str, way: str) -> None:
    from vlmkit import merged
    from vlmruns import furthest, of, run, same, trainable

    ranks, accumulate, shared, own = WAYS[way]
    plain = merged(trainable(fusion), shared)
    key = (fusion, repr(shared))
    if key not in PLAIN:
        PLAIN[key] = run(of(folder, **plain))
    mine = of(folder, ranks, accumulate, **merged(plain, own))
    sizes = [size for size in own.get("distributed", {}).values() if isinstance(size, int)]
    processes = max(ranks, *sizes, 1)
    found = pool2.run(run, mine, timeout=280) if processes > 1 else [run(mine)]
    for each in found:
        same(each, PLAIN[key])
    DONE[fusion, way] = max(furthest(each, PLAIN[key]) for each in found)


def test_the_table_of_what_was_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """The largest difference of a weight from the plain run, of the cells that ran in this session."""
    width = max(map(len, WAYS))
    rows = (*FUSIONS, *OF_BLOCKS)
    lines = [" " * width + "".join(f"{fusion:>19}" for fusion in rows)]
    for way in WAYS:
        texts = [f"{DONE[f, way]:.0e}" if (f, way) in DONE else "-" for f in rows]
        lines.append(f"{way:<{width}}" + "".join(f"{text:>19}" for text in texts))
    with capsys.disabled():
        print("\n" + "\n".join(lines))
    assert all(difference < 1e-9 for difference in DONE.values())
