"""Several samples in one sequence: which ones, and that they have the loss and gradients they have alone."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vlmdatakit import open_source
from vlmkit import merged, mixed_records, tables, write_samples

from forge_core.plugins import Plugins
from forge_core.testing import tiny_config, tiny_session
from forge_vlm.data.packing import Rows, Size, best_fit, neighbours

HOW: dict[str, dict[str, Any]] = {
    "alone": {},
    "neighbours": {"vlm/images": {"pack": True}},
    "best_fit": {"vlm/images": {"pack": True}, "packing": "best_fit"},
}


def random_sizes(count: int) -> list[Size]:
    random = np.random.default_rng(0)
    sizes = zip(
        random.integers(1, 33, count), random.integers(0, 4, count), random.integers(0, 9, count), strict=True
    )
    return [(int(a), int(b), int(c)) for a, b, c in sizes]


@pytest.mark.parametrize("how", [None, "neighbours", "best_fit"])
def test_rows_hold_every_sample_once_and_no_more_than_fits(how: str | None) -> None:
    sizes, most = random_sizes(500), (32, 4, 12)
    rows = Rows.of(np.array(sizes), most, how)
    assert rows[:] == list(rows)
    assert sorted(number for row in rows for number in row) == list(range(500))
    for row in rows:
        assert all(sum(sizes[n][part] for n in row) <= most[part] for part in range(3))


def test_neighbours_are_neighbours_and_best_fit_leaves_less_over() -> None:
    sizes, most = random_sizes(500), (32, 4, 12)
    near = list(neighbours(sizes, most))
    assert [number for row in near for number in row] == list(range(500))
    assert len(best_fit(sizes, most)) < 0.85 * len(near)


def test_best_fit_equals_a_plain_one() -> None:
    """Longest first, each into the row with the least room that holds it, the oldest of equal ones."""
    sizes, most = random_sizes(200), (32, 4, 12)
    rows: list[list[int]] = []
    for number in sorted(range(200), key=lambda n: (-sizes[n][0], n)):
        fitting = []
        for k, row in enumerate(rows):
            used = [sum(sizes[n][part] for n in row) + sizes[number][part] for part in range(3)]
            if all(a <= b for a, b in zip(used, most, strict=True)):
                fitting.append((32 - used[0], k))
        if fitting:
            rows[min(fitting)[1]].append(number)
        else:
            rows.append([number])
    assert best_fit(sizes, most) == sorted((sorted(row) for row in rows), key=lambda row: row[0])


def gradients(folder: Path, how: str, fusion: dict[str, Any]) -> tuple[float, int, int, dict[str, Any]]:
    """Summed loss, supervised tokens, rows, and gradients of the sum over all samples."""
    vlm = merged({"max_images": 4, "encoder": {"frozen": False}}, fusion)
    plugins = Plugins()
    found = tables(folder, data=HOW[how], vlm=vlm, train={"seq_len": 64})
    with tiny_session(tiny_config(plugins=plugins, **found), plugins) as session:
        source: Any = session.data.train.sources[0]  # type: ignore[attr-defined]
        total, count = 0.0, 0
        for number in range(len(source)):
            row = {name: torch.as_tensor(value)[None] for name, value in source[number].items()}
            output = session.forward(session.model, row)
            output.loss_sum.backward()
            total += float(output.loss_sum.detach())
            count += session.forward.count(row)["tokens"]
        named = {name: p.grad for name, p in session.model.named_parameters() if p.grad is not None}
        return total, count, len(source), named


FUSIONS: dict[str, dict[str, Any]] = {
    "joint": {},
    "image blocks": {"joint": {"bidirectional": "image"}},
    "prefix": {"joint": {"bidirectional": "prefix"}},
    "cross_attention": {"fusion": "cross_attention", "cross_attention": {"every": 2}},
    "mot": {"fusion": "mot"},
}


@pytest.mark.parametrize("fusion", FUSIONS)
def test_packed_samples_have_the_loss_and_gradients_they_have_alone(tmp_path: Path, fusion: str) -> None:
    write_samples(tmp_path, mixed_records())
    total, count, rows, expected = gradients(tmp_path, "alone", FUSIONS[fusion])
    fewer = rows
    for how in ("neighbours", "best_fit"):
        loss, tokens, packed, found = gradients(tmp_path, how, FUSIONS[fusion])
        assert packed < fewer or (how == "best_fit" and packed <= fewer)
        fewer = packed
        assert tokens == count
        assert loss == pytest.approx(total, rel=1e-10)
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-10, msg=name)


def test_rows_are_the_same_again_and_a_fingerprint_tells_them_apart(tmp_path: Path) -> None:
    write_samples(tmp_path, mixed_records())
    prints = set()
    for how, _ in product(HOW, range(2)):
        source = open_source(
            tmp_path, "vlm/images", data=HOW[how], train={"seq_len": 64}, vlm={"max_images": 4}
        )
        prints.add(source.fingerprint)
    assert len(prints) == 3
