"""The report: complete in itself, and its data is what metrics.jsonl holds."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from forge_core.errors import ForgeError, UsageError
from forge_core.metrics.jsonl import JsonlWriter
from forge_core.metrics.report import MOST_POINTS, read_series, report_data, thinned, write_report

STEPS = 40


def make_run(folder: Path, lr: float, status: int | None = 0) -> Path:
    folder.mkdir(parents=True)
    writer = JsonlWriter(folder / "metrics.jsonl")
    for step in range(1, STEPS + 1):
        loss = math.nan if step == 5 else 2 + lr * 100 / step
        writer.write(step, {"train/loss": loss, "train/lr": lr, "train/grad_norm": 1 / step, "loss/<b>": 1.0})
        if step % 10 == 0:
            writer.write(step, {"eval/loss": loss + 0.125})
    writer.close()
    text = f'[optimizer]\nlr = {lr}  # from a flag\nname = "adamw"\n[run]\ndate = 2026-01-01\n'
    text += '[metrics.mlflow]\ntracking_uri = "https://example.org/</script><b>"\n[data]\nlimit = inf\n'
    (folder / "config.toml").write_text(text)
    if status is not None:
        (folder / "exit.json").write_text(json.dumps({"status": status, "reason": "the guard gave up"}))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    first = make_run(tmp_path / "first", 1e-3)
    second = make_run(tmp_path / "second", 3e-3, status=3)
    incident = second / "incidents" / "step_00000005"
    incident.mkdir(parents=True)
    summary = {
        "step": 5,
        "loss": "nan",
        "samples": {"first": 32},
        "parameters": {str(i): 1.0 for i in range(50)},
    }
    (incident / "summary.json").write_text(json.dumps(summary))
    (incident / "batch.npz").write_bytes(b"")
    return [first, second]


class Page(HTMLParser):
    """Tags with their attributes, and what stands in scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script":
            self.scripts[-1] += data


def page_of(runs: list[Path], out: Path) -> str:
    write_report(runs, out)
    return out.read_text(encoding="utf-8")


def test_nothing_outside_the_page_is_named(runs: list[Path], tmp_path: Path) -> None:
    text = page_of(runs, tmp_path / "report.html")
    assert not re.search(r"https?://|//[a-z]|@import|url\((?!#)", text.replace("// ", ""))
    page = Page(text)
    for tag, attributes in page.tags:
        assert "src" not in attributes, tag
        assert attributes.get("href", "data:,") == "data:,", tag
    policies = [a["content"] for t, a in page.tags if t == "meta" and a.get("http-equiv")]
    assert policies
    assert (policies[0] or "").startswith("default-src 'none'")
    assert not re.search(r"/\*(STYLE|SCRIPT|DATA)\*/", text)
    assert [t for t, _ in page.tags].count("script") == 2  # the data cannot close its element


def embedded_data(text: str) -> Any:
    return json.loads(Page(text).scripts[0])


def test_the_data_is_that_of_the_files(runs: list[Path], tmp_path: Path) -> None:
    data = embedded_data(page_of(runs, tmp_path / "report.html"))
    assert [run["name"] for run in data["runs"]] == ["first", "second"]
    assert data["metrics"] == ["eval/loss", "loss/<b>", "train/grad_norm", "train/loss", "train/lr"]
    for run, folder in zip(data["runs"], runs, strict=True):
        found: dict[str, dict[int, Any]] = {}
        for line in (folder / "metrics.jsonl").read_text().splitlines():
            record = json.loads(line)
            for name in record.keys() - {"step"}:
                found.setdefault(name, {})[record["step"]] = record[name]
        curves = {n: dict(zip(c["steps"], c["values"], strict=True)) for n, c in run["series"].items()}
        assert curves == found
        assert curves["train/loss"][5] is None
    first, second = data["runs"]
    assert (first["first_step"], first["last_step"]) == (1, STEPS)
    assert first["config"]["optimizer.lr"] == 0.001
    assert first["config"]["run.date"] == "2026-01-01"
    assert first["config"]["data.limit"] == "inf"
    assert first["config"]["metrics.mlflow.tracking_uri"] == "https://example.org/</script><b>"
    assert (first["exit"]["status"], second["exit"]["status"]) == (0, 3)
    assert first["incidents"] == []
    assert second["incidents"] == [
        {"name": "step_00000005", "facts": {"step": 5, "loss": "nan", "samples.first": 32}}
    ]


def test_the_last_record_of_a_step_counts_and_a_torn_line_does_not(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 8, "a": 1.0}\n{"step": 9, "a": 2.0}\n{"step": 8, "a": 3.0, "b": 1}\n'
        '{"step": 8, "c": "text"}\n{"step": 10, "a": 4.0}'
    )
    assert read_series(path) == {
        "a": {"steps": [8, 9], "values": [3.0, 2.0]},
        "b": {"steps": [8], "values": [1]},
    }


def test_a_long_curve_keeps_its_extremes() -> None:
    rng = random.Random(0)
    points: list[tuple[int, float | None]] = [(i, rng.gauss(0, 1)) for i in range(100_000)]
    points[41_234] = (41_234, 50.0)
    points[77_777] = (77_777, -60.0)
    points[12_345] = (12_345, None)
    kept = thinned(points)
    assert len(kept["steps"]) <= MOST_POINTS
    assert kept["steps"] == sorted(set(kept["steps"]))
    found = dict(zip(kept["steps"], kept["values"], strict=True))
    assert found.items() <= dict(points).items()
    assert {0, 99_999, 41_234, 77_777, 12_345} <= found.keys()
    assert len(found) > MOST_POINTS / 2
    assert thinned(points[:MOST_POINTS])["steps"] == list(range(MOST_POINTS))


def test_names_tell_runs_apart(tmp_path: Path) -> None:
    make_run(tmp_path / "a" / "run", 1e-3)
    make_run(tmp_path / "b" / "run", 1e-3)
    data = report_data([tmp_path / "a" / "run", tmp_path / "b" / "run"])
    assert [run["name"] for run in data["runs"]] == ["a/run", "b/run"]


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    folder = tmp_path / "young"
    folder.mkdir()
    (folder / "metrics.jsonl").touch()
    (run,) = embedded_data(page_of([folder], tmp_path / "report.html"))["runs"]
    assert run == {
        "name": "young",
        "series": {},
        "first_step": None,
        "last_step": None,
        "config": {},
        "exit": None,
        "incidents": [],
    }


def test_what_is_no_run_folder(runs: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no metrics.jsonl"):
        write_report([runs[0], tmp_path], tmp_path / "report.html")
    with pytest.raises(UsageError, match="no run"):
        write_report([], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
    with pytest.raises(ForgeError, match=r"cannot write .*nowhere/report.html: No such file"):
        write_report(runs, tmp_path / "nowhere" / "report.html")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not look")
@pytest.mark.parametrize("locked", [".", "metrics.jsonl", "incidents"])
def test_a_run_that_this_user_may_not_read(locked: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "incidents").mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.0}\n')
    for parent in (tmp_path, *tmp_path.parents):  # pytest's own are for its user alone
        if not parent.stat().st_mode & 0o001:
            parent.chmod(0o755)
    (run / locked).chmod(0)
    os.setegid(65534)
    os.seteuid(65534)
    try:
        with pytest.raises(UsageError, match=r"cannot read .*: Permission denied") as caught:
            write_report([run], tmp_path / "report.html")
    finally:
        os.seteuid(0)
        os.setegid(0)
    assert caught.value.hint == "make it readable for this user (chmod, chown)"


def test_a_full_disk_keeps_the_old_page(runs: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    out.write_text("old")
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from forge_core.metrics.report import write_report\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        "try: write_report([Path(sys.argv[1])], Path(sys.argv[2]))\n"
        "except Exception as e: sys.exit(e.message)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(runs[0]), str(out)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, f"cannot write {out}: File too large\n")
    assert out.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "report.html", "second"]


# In a browser -----------------------------------------------------------------------------------------------

BROWSER = os.environ.get("FORGE_BROWSER", "")
PROBE = """<script>
document.getElementById("log").click();
document.getElementById("smooth").value = "0.5";
document.getElementById("smooth").dispatchEvent(new Event("input"));
charts.forEach((chart) => chart.draw());
const box = charts[0].svg.getBoundingClientRect();
const place = { clientX: box.right - 14, clientY: box.top + 50 };
charts[0].svg.dispatchEvent(new PointerEvent("pointermove", place));
document.documentElement.setAttribute("data-tip", charts[0].tip.textContent);
</script>"""


@pytest.mark.skipif(not BROWSER, reason="set FORGE_BROWSER to a Chromium, e.g. FORGE_BROWSER=chromium")
def test_a_browser_draws_it(runs: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(page_of(runs, page) + PROBE)
    assert shutil.which(BROWSER), f"FORGE_BROWSER={BROWSER} is no program"
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    done = subprocess.run(
        [*command, "--enable-logging=stderr", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
        env={**os.environ, "HOME": str(tmp_path)},
    )
    assert "Uncaught" not in done.stderr
    assert "Refused to" not in done.stderr
    dom = done.stdout
    assert 'data-ready="yes"' in dom
    tip = re.search(r'data-tip="([^"]*)"', dom)
    assert tip is not None
    assert tip[1].startswith(f"step {STEPS}first2.0025")
    assert "second2.0075" in tip[1]
    for name in ("train/loss", "eval/loss", "loss/&lt;b&gt;"):
        chart = re.search(
            rf'<article class="chart" data-metric="{re.escape(name)}">.*?</article>', dom, re.DOTALL
        )
        assert chart is not None, name
        curves = re.findall(r'<path class="curve" d="([^"]*)"', chart[0])
        assert len(curves) == 2
        assert all(curve.startswith("M") and "NaN" not in curve for curve in curves)
    loss = re.search(r'data-metric="train/loss">.*?</article>', dom, re.DOTALL)
    assert loss is not None
    assert loss[0].count('class="gap"') == 2
    assert all(c.count("M") == 2 for c in re.findall(r'<path class="curve" d="([^"]*)"', loss[0]))
    assert "the guard gave up (status 3)" in dom
    assert "step_00000005" in dom
    assert re.search(
        r"<tr><td><code>optimizer.lr</code></td><td[^>]*><code>0.001</code></td><td[^>]*><code>0.003", dom
    )
    assert "</script><b>" not in dom.split('id="data"')[0]
