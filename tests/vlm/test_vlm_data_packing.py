"""Several samples in one sequence: which ones, and that they have the loss and gradients they have alone."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vlmdatakit import open_source
from vlmkit import merged, mixed_records, tables, write_samples

from forge_core.plugins import Plugins
from forge_core.testing import tiny_config, tiny_session
from forge_vlm.data import plans
from forge_vlm.data.packing import Rows, Size, best_fit, neighbours
from forge_vlm.data.remembered import digest_of, write_columns
from forge_vlm.data.stored import Columns

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


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Any, list[Any]]:
    """Plans rows that are few and kept all the same; and what was planned."""
    made: list[Any] = []
    before = Rows.of.__func__  # type: ignore[attr-defined]

    def told(cls: Any, *about: Any) -> Rows:
        made.append(about)
        return before(cls, *about)

    monkeypatch.setattr(Rows, "of", classmethod(told))
    monkeypatch.setattr(plans, "SMALL", 2)
    spec = SimpleNamespace(name="pictures", cache_dir=str(tmp_path / "cache"))

    def planned(sizes: list[Size], most: Size = (32, 4, 12), how: str | None = "best_fit") -> Rows:
        return plans.planned(spec, np.array(sizes, dtype="<i4"), most, how)  # type: ignore[arg-type]

    return planned, made


@pytest.mark.parametrize("how", ["neighbours", "best_fit"])
def test_rows_are_planned_once(plan: tuple[Any, list[Any]], how: str) -> None:
    planned, made = plan
    first = planned(random_sizes(300), how=how)
    again = planned(random_sizes(300), how=how)
    assert len(made) == 1
    assert again[:] == first[:]
    assert len(again) == len(first)


def test_what_rows_depend_on_plans_them_anew(
    plan: tuple[Any, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, made = plan
    sizes = random_sizes(300)
    other = [(sizes[0][0] + 1, *sizes[0][1:]), *sizes[1:]]
    changes: list[dict[str, Any]] = [
        {},
        {"sizes": other},
        {"sizes": sizes[::-1]},
        {"sizes": sizes[:-1]},
        *({"most": most} for most in ((33, 4, 12), (32, 5, 12), (32, 4, 13))),
        {"how": "neighbours"},
    ]
    for number, change in enumerate(changes, 1):
        found = planned(**{"sizes": sizes, **change})[:]
        assert found == Rows.of(*made[-1])[:]
        made.pop()
        assert len(made) == number
    for name in ("_PLANNER", "__version__"):
        monkeypatch.setattr(plans, name, "another")
        planned(sizes)
    assert len(made) == len(changes) + 2


@pytest.mark.parametrize("how", ["cut short", "a byte", "nothing", "of others", "without ends"])
def test_damaged_rows_are_planned_anew(
    plan: tuple[Any, list[Any]], tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    planned, made = plan
    first = planned(random_sizes(300))[:]
    (file,) = tmp_path.glob("cache/samples/*.rows")
    content = bytearray(file.read_bytes())
    content[-100] ^= 1
    file.unlink()
    if how in ("of others", "without ends"):
        order = np.arange(299 if how == "of others" else 300)
        arrays = {"order": order, **({"ends": order + 1} if how == "of others" else {})}
        write_columns(file, Columns(arrays, digest_of(arrays), {}))
    else:
        file.write_bytes({"cut short": bytes(content[:-50]), "nothing": b""}.get(how, bytes(content)))
    assert planned(random_sizes(300))[:] == first
    assert "is damaged, and made again" in caplog.text
    assert len(made) == 2
    assert planned(random_sizes(300))[:] == first
    assert len(made) == 2


def test_rows_without_a_cache(
    plan: tuple[Any, list[Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    planned, made = plan
    (tmp_path / "cache").write_text("")
    assert planned(random_sizes(300))[:] == Rows.of(*made.pop())[:]
    assert "which samples share a sequence cannot be kept" in caplog.text


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
