"""`forge report`: one HTML page with the curves of one or several runs, complete in itself.

The page (page/report.html, .css, .js) holds its style, script and data, and its content policy forbids it to
load anything else.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from forge_core.errors import ForgeError, UsageError
from forge_core.files import replace_file
from forge_core.metrics.jsonl import read_records
from forge_core.metrics.writers import flatten, resolved_config
from forge_core.version import __version__

MOST_POINTS = 8_000
"""Points of a curve that the page holds. A longer one keeps the extremes of equal stretches."""

MOST_FACTS = 6
"""Numbers under one key of an incident's summary that the page shows."""

Series = dict[str, dict[str, list[Any]]]


def write_report(runs: Sequence[Path], out: Path) -> None:
    """Write the report of `runs` (run folders) to `out`, replaced as a whole or not at all.

    Raises:
        UsageError: a folder holds no run, or none that this user may read.
        ForgeError: `out` cannot be written.
    """
    data = report_data(runs)
    page = {name: _page(f"report.{name}") for name in ("html", "css", "js")}
    text = page["html"]
    for mark, part in (("STYLE", page["css"]), ("SCRIPT", page["js"]), ("DATA", embedded(data))):
        text = text.replace(f"/*{mark}*/", part, 1)
    try:
        replace_file(out, text.encode())
    except OSError as error:
        raise ForgeError(
            f"cannot write {out}: {error.strerror or error}", "choose another place for the report"
        ) from error


def report_data(runs: Sequence[Path]) -> dict[str, Any]:
    """What the page shows: names of metrics; of each run curves, settings, incidents and exit status."""
    if not runs:
        raise UsageError("no run to report on", "forge report runs/NAME [runs/OTHER ...]")
    found = [_run_data(run, name) for run, name in zip(runs, _names(runs), strict=True)]
    return {
        "version": __version__,
        "written": time.strftime("%Y-%m-%d %H:%M"),
        "metrics": sorted({name for run in found for name in run["series"]}),
        "runs": found,
    }


def embedded(data: Any) -> str:
    """JSON that may stand inside a script element: no tag can end or begin in it, and no address appears."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("//", "\\/\\/")


def read_series(path: Path) -> Series:
    """Curves of a metrics file by name, as `{"steps": [...], "values": [...]}` in growing steps.

    Of two values of one step the last counts. None stands for a value that was not finite.
    """
    points: dict[str, dict[int, float | None]] = {}
    for record in read_records(path):
        for name, value in record.items():
            if name != "step" and (value is None or isinstance(value, int | float)):
                points.setdefault(name, {})[record["step"]] = value
    return {name: thinned(sorted(curve.items())) for name, curve in points.items()}


def thinned(points: Sequence[tuple[int, float | None]], most: int = MOST_POINTS) -> dict[str, list[Any]]:
    """At most about `most` of the points: first and last, and the extremes and gaps of each stretch."""
    kept: Iterable[int] = range(len(points))
    if len(points) > most:
        stretch = -(-3 * len(points) // most)
        chosen = {0, len(points) - 1}
        for begin in range(0, len(points), stretch):
            chosen.update(_extremes(points, range(begin, min(begin + stretch, len(points)))))
        kept = sorted(chosen)
    pairs = [points[i] for i in kept]
    return {"steps": [step for step, _ in pairs], "values": [value for _, value in pairs]}


def _extremes(points: Sequence[tuple[int, float | None]], stretch: range) -> set[int]:
    finite = [(value, i) for i in stretch if (value := points[i][1]) is not None]
    gaps = {i for i in stretch if points[i][1] is None}
    return set(list(gaps)[:1]) | ({min(finite)[1], max(finite)[1]} if finite else set())


def _run_data(run: Path, name: str) -> dict[str, Any]:
    metrics = run / "metrics.jsonl"
    try:
        if not metrics.is_file():
            raise UsageError(
                f"{run} is no run folder: it holds no metrics.jsonl", "name a folder that `forge train` made"
            )
        metrics.open("rb").close()
        incidents = [_incident(entry) for entry in _entries(run / "incidents")]
    except OSError as error:
        message = f"cannot read {error.filename or run}: {error.strerror}"
        raise UsageError(message, "make it readable for this user (chmod, chown)") from error
    series = read_series(metrics)
    return {
        "name": name,
        "series": series,
        "first_step": min((curve["steps"][0] for curve in series.values()), default=None),
        "last_step": max((curve["steps"][-1] for curve in series.values()), default=None),
        "config": {key: _plain(value) for key, value in flatten(resolved_config(run))},
        "exit": _json(run / "exit.json"),
        "incidents": incidents,
    }


def _names(runs: Sequence[Path]) -> list[str]:
    """Folder names, with as many parents as it takes to tell the runs apart."""
    parts = [Path(os.path.abspath(run)).parts for run in runs]  # noqa: PTH100 (a link keeps the name the user gave)
    names = ["/".join(p[-1:]) for p in parts]
    depth = 1
    while len(set(names)) < len(set(parts)):
        depth += 1
        names = ["/".join(p[-depth:]) for p in parts]
    return names


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _incident(entry: Path) -> dict[str, Any]:
    """Name and facts of an incident, a JSON file or a folder that holds some. Long facts are left there."""
    files_ = sorted(entry.glob("*.json")) if entry.is_dir() else [entry] if entry.suffix == ".json" else []
    facts: dict[str, Any] = {}
    for file in files_:
        for key, value in (_json(file) or {}).items():
            leaves = dict(flatten(value, key))
            if len(leaves) <= MOST_FACTS and not any(
                isinstance(v, list) and len(v) > MOST_FACTS for v in leaves.values()
            ):
                facts.update(leaves)
    return {"name": entry.name, "facts": {key: _plain(value) for key, value in facts.items()}}


def _json(path: Path) -> dict[str, Any] | None:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _plain(value: Any) -> Any:
    """A value as strict JSON has it: no NaN, dates as text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)


def _page(name: str) -> str:
    return (files("forge_core.metrics") / "page" / name).read_text(encoding="utf-8")
