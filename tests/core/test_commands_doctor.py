"""`forge doctor`: what it finds, what is a fault, and its exit status."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pluginkit import installed, package

from forge_core.commands import doctor
from forge_core.commands.main import main


def findings(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    status = main(["doctor", "--json", *arguments])
    found = json.loads(capsys.readouterr().out)
    assert found["healthy"] == (status == 0)
    return status, {one["what"]: one for one in found["findings"]}


def test_this_machine_is_healthy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, found = findings(capsys, "--dir", str(tmp_path))
    assert status == 0
    assert found["python"]["tag"] == found["torch"]["tag"] == "OK"
    assert sys.executable in found["python"]["text"]
    assert "gloo" in found["processes"]["text"]
    assert "GiB free" in found["run folder"]["text"]
    assert {f"extra {name}" for name in doctor.EXTRAS} <= found.keys()


def test_it_is_readable(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--dir", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(("OK  ", "WARN", "MISS", "    ")) for line in lines)


def test_a_broken_plugin_is_a_warning_with_the_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with installed([package(tmp_path, "lame", "import a_module_that_is_not_there")]):
        status, _ = findings(capsys, "--dir", str(tmp_path))
        (lame,) = [one for one in doctor.plugins() if "lame" in one.text]
    assert status == 0
    assert (lame.tag, "a_module_that_is_not_there" in lame.hint) == ("WARN", True)


def test_a_missing_extra_is_told_with_the_line_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    found = {one.what: one for one in doctor.extras()}
    assert found["extra wandb"].text == "not installed"
    assert found["extra wandb"].tag == "OK"
    assert '-m pip install "wandb>=' in found["extra wandb"].hint
    assert "mlflow-skinny" in found["extra mlflow"].hint


def test_extras_of_plugin_packages_are_told_too(tmp_path: Path) -> None:
    one = package(tmp_path, "grown", "", distribution="dist-grown")
    lines = [
        "Requires-Dist: pytest>=8; extra == 'there'",
        'Requires-Dist: nowhere-to-be-had[more]>=2,<3 ; extra == "part"',
        "Requires-Dist: pytest; extra == 'part'",
        "Requires-Dist: nowhere-to-be-had",
        "Requires-Dist: nowhere-to-be-had; extra == 'dev'",
    ]
    (metadata,) = one.folder.glob("*.dist-info/METADATA")
    metadata.write_text(metadata.read_text() + "\n".join(lines) + "\n")
    with installed([one]):
        found = {finding.what: finding for finding in doctor.extras()}
    assert {name for name in found if "dist-grown" in name} == {
        "extra dist-grown[there]",
        "extra dist-grown[part]",
    }
    assert found["extra dist-grown[there]"].text == f"pytest {pytest.__version__}"
    part = found["extra dist-grown[part]"]
    assert (part.tag, part.text) == ("OK", "not installed")
    assert part.hint.endswith('-m pip install "nowhere-to-be-had[more]>=2,<3"')


def test_a_torch_that_does_not_import_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken() -> Iterator[doctor.Finding]:
        yield doctor.Finding("MISS", "torch", "ImportError: libcudart.so.12")

    looks = tuple(broken if look is doctor.torch_and_devices else look for look in doctor.LOOKS)
    monkeypatch.setattr(doctor, "LOOKS", looks)
    status, found = findings(capsys, "--dir", str(tmp_path))
    assert status == 1
    assert found["torch"]["tag"] == "MISS"


def test_a_folder_that_cannot_hold_runs_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    (one,) = doctor.disk(tmp_path / "file" / "runs")
    assert (one.tag, "is not a folder" in one.text) == ("MISS", True)
    (one,) = doctor.disk(tmp_path / "not" / "yet" / "there")
    assert one.tag == "OK"
    monkeypatch.setattr(os, "access", lambda *_: False)
    (one,) = doctor.disk(tmp_path)
    assert (one.tag, "cannot be written" in one.text) == ("MISS", True)
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda place: type("Usage", (), {"free": 10**6}))
    (one,) = doctor.disk(tmp_path)
    assert one.tag == "WARN"


def test_more_threads_than_cores_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 10_000)
    cpu = next(one for one in doctor.devices() if one.what == "cpu")
    assert cpu.tag == "WARN"
    assert cpu.hint.startswith("set OMP_NUM_THREADS=")
