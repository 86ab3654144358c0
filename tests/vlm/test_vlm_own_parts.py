"""The package that docs/vlm.md writes: an encoder, a connector, a fusion, a policy and a metric."""

from __future__ import annotations

import re
import textwrap
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from vlmkit import merged, mixed_records, write_samples
from vlmparts import PAGE, SIZES, run_with_parts, tables_of_parts, with_parts, write_package

from forge_core.testing import tiny_config, tiny_session
from forge_core.testing.pool import WorkerPool
from forge_vlm.data.frames import Clip
from forge_vlm.flops import encoder_flops
from forge_vlm.geometry import shape_of

LAYOUTS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "fsdp 2": ((2, 2), {}),
    "tp 2": ((1, 1), {"distributed": {"tp": 2}}),
    "cp 2": ((1, 1), {"distributed": {"cp": 2}}),
    "recomputed": ((1, 2), {"train": {"activation_checkpointing": "full"}}),
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_package(tmp_path_factory.mktemp("forge-glance"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("samples"), mixed_records(40))


@pytest.fixture(scope="module")
def expected(package: Path, folder: Path) -> dict[str, Any]:
    return run_with_parts(package, tables_of_parts(folder))


def test_every_part_takes_part(package: Path, folder: Path, expected: dict[str, Any]) -> None:
    """All that the page adds has moved; answers have their bytes and their end."""
    plugins = with_parts(package)
    with tiny_session(tiny_config(plugins=plugins, **tables_of_parts(folder)), plugins) as session:
        start = {name: value.clone() for name, value in session.model.state_dict().items()}
    for part in ("encoder.patches.weight", "connector.queries", "decoder.layers.0_after0.mean.proj.weight"):
        assert (expected["weights"][part] - start[part]).abs().max() > 0, part
    assert expected["length"]
    assert all(2 < length <= 4 for length in expected["length"])


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=() if n == "fsdp 2" else pytest.mark.slow) for n in LAYOUTS]
)
def test_they_train_on_every_layout(
    pool2: WorkerPool, package: Path, folder: Path, expected: dict[str, Any], layout: str
) -> None:
    batch, more = LAYOUTS[layout]
    tables = tables_of_parts(folder, *batch, **more)
    runs = (
        [run_with_parts(package, tables)]
        if layout == "recomputed"
        else pool2.run(run_with_parts, package, tables)
    )
    for found in runs:
        for name in ("losses", "norms", "eval", "length"):
            assert found[name] == pytest.approx(expected[name], rel=1e-9), name
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-9, atol=1e-9, msg=name)


def test_a_configuration_names_them_as_the_page_says(package: Path, folder: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    (block,) = (
        block for block in re.findall(r"(?:^(?:    .*)?\n)+", page, re.MULTILINE) if "glance/mean" in block
    )
    vlm = tomllib.loads(textwrap.dedent(block))["vlm"]
    tables = tables_of_parts(folder)
    tables["vlm"] = merged(vlm, {"encoder": {"glance/flat": SIZES}})
    config = tiny_config(plugins=with_parts(package), **tables)
    assert shape_of(config).tokens == 8
    assert encoder_flops(config.options("vlm.encoder", "glance/flat")) == 6 * 4 * 16 * 16


def test_its_policy_picks_both_ends(package: Path) -> None:
    with_parts(package)
    ends = import_module("forge_glance.parts").Ends(None)
    assert ends(Clip(seconds=2.0, rate=4.0)) == [0.0, 1.75]
    assert ends(Clip(seconds=0.25, rate=4.0)) == [0.0]
