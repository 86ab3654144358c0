"""`forge checkpoint`, the plugin as such, and the save strategies of others."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ckptkit import names, run

import forge_ckpt.plugin
from forge_ckpt.manifest import Manifest
from forge_ckpt.retention import kept
from forge_ckpt.schedule import SaveSchedule, power2
from forge_ckpt.table import CheckpointConfig
from forge_core.commands.main import main
from forge_core.contract import Component
from forge_core.errors import ConfigError
from forge_core.testing import PluginConformance, isolated_plugins, plugin_object, run_tiny, tiny_config


class TestConformance(PluginConformance):
    plugin = "checkpoint"
    config = {"checkpoint": {"interval": 2, "keep_best": 1}, "run": {"name": "a"}}  # noqa: RUF012


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run(folder, steps=4, checkpoint={"interval": 2})
    return folder / "a"


def test_ls(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "ls", str(saved), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["step"], row["kind"], row["latest"]) for row in rows] == [
        (2, "scheduled", False),
        (4, "final", True),
    ]
    assert all(row["problem"] == "" and row["bytes"] > 10000 for row in rows)
    assert main(["checkpoint", "ls", str(saved)]) == 0
    assert "step_00000002  scheduled" in capsys.readouterr().out


def test_verify(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(saved)]) == 0
    path = saved / "checkpoints/step_00000004/index.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2] + b" \n")
    try:
        assert main(["checkpoint", "verify", str(saved)]) == 1
        out = capsys.readouterr().out
        assert "step_00000002: whole" in out
        assert "index.json is damaged" in out
    finally:
        path.write_bytes(whole)


def test_diff(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = saved / "checkpoints/step_00000004"
    assert main(["checkpoint", "diff", str(saved), str(last)]) == 0
    assert capsys.readouterr().out.strip() == "no difference"
    assert main(["checkpoint", "diff", str(saved / "checkpoints/step_00000002"), str(last)]) == 1
    out = capsys.readouterr().out
    assert "model/embed.weight:" in out
    assert "model/layers.0.attn_norm.weight: 16 of 16 values differ" in out
    assert re.search(r"and \d+ more tensors", out)


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ([NAN, 1.0], [NAN, 1.0], ""),
        ([NAN, 1.0], [NAN, 3.0], "1 of 2 values differ, by 2 at most"),
        ([NAN, 1.0], [2.0, 1.0], "1 of 2 values differ, by nan at most"),
        ([INF, 1.0], [INF, 3.0], "1 of 2 values differ, by 2 at most"),
        ([1 + 1j, 0], [1 + 3j, 0], "1 of 2 values differ, by 2 at most"),
        ([True, False], [True, True], "1 of 2 values differ, by 1 at most"),
    ],
)
def test_how_far_values_lie_apart(one: list[Any], other: list[Any], words: str) -> None:
    import torch

    from forge_ckpt.commands.differences import _difference

    assert _difference(torch.tensor(one), torch.tensor(other)) == words


def test_prune(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, steps=6)
    place = str(tmp_path / "a")
    (tmp_path / "a/checkpoints/.saving_step_00000007_0123abcd").mkdir()
    assert main(["checkpoint", "prune", place, "--keep-last", "2", "--keep-every", "3", "--dry-run"]) == 0
    assert len(names(tmp_path)) == 8
    assert main(["checkpoint", "prune", place, "--keep-last", "2", "--keep-every", "3"]) == 0
    assert names(tmp_path) == ["latest", "step_00000003", "step_00000005", "step_00000006"]
    assert "removed step_00000001" in capsys.readouterr().out
    assert main(["checkpoint", "prune", place, "--keep-last", "0"]) == 2


def test_one_that_cannot_be_removed_is_named_beside_those_that_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from forge_ckpt.store import LocalStore

    run(tmp_path, steps=3)
    real = LocalStore.remove

    def remove(self: Any, name: str) -> None:
        if name == "step_00000002":
            raise PermissionError(13, "Permission denied")
        real(self, name)

    monkeypatch.setattr(LocalStore, "remove", remove)
    prune = ["checkpoint", "prune", str(tmp_path / "a"), "--keep-last", "1"]
    assert main(prune) == 1
    words = r"cannot remove .*step_00000002: Permission denied \(removed before: step_00000001\)"
    assert re.search(words, capsys.readouterr().err)
    assert main([*prune, "--keep-every", "-2"]) == 2
    assert "--keep-every must be at least 0" in capsys.readouterr().err


@pytest.mark.parametrize("apart", [False, True])
def test_nothing_is_removed_from_a_run_that_is_under_way(
    apart: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its checkpoints may lie beside it or elsewhere."""
    elsewhere = {"url": str(tmp_path / "elsewhere")} if apart else {}
    done = run(tmp_path, steps=3, checkpoint=elsewhere)
    folder = tmp_path / ("elsewhere/a" if apart else "a/checkpoints")
    (folder / ".saving_step_00000004_0123abcd").mkdir()
    before = sorted(p.name for p in folder.iterdir())
    command = ["checkpoint", "prune", str(folder if apart else tmp_path / "a"), "--keep-last", "1"]
    with done.session.run.claim():
        assert main(command) == 2
        told = capsys.readouterr().err
        assert "is in use by process" in told
        assert "nothing is removed" in told
        assert main([*command, "--dry-run"]) == 0
        assert sorted(p.name for p in folder.iterdir()) == before
    assert main(command) == 0
    assert sorted(p.name for p in folder.iterdir()) == ["latest", "step_00000003"]


@pytest.mark.parametrize("place", ["nowhere", "."])
def test_nothing_there_is_one_clear_line(
    place: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["checkpoint", "ls", str(tmp_path / place)]) == 2
    assert "there are no checkpoints in" in capsys.readouterr().err


def test_looking_and_removing_import_no_torch(saved: Path) -> None:
    code = (
        "import sys; from forge_core.commands.main import main\n"
        "place = sys.argv[1]\n"
        "assert main(['check', 'quickstart-saved']) == 0\n"
        "assert main(['checkpoint', 'ls', place]) == 0\n"
        "assert main(['checkpoint', 'verify', place]) == 0\n"
        "assert main(['checkpoint', 'prune', place, '--keep-last=9']) == 0\n"
        "try: main(['checkpoint', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules"
    )
    words = [sys.executable, "-c", code, str(saved)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("window", "interval", "last", "expected"),
    [
        # worked out by hand: first + 0, 1, 2, 4, ... up to last inclusive; multiples of interval elsewhere
        ([0, 512], 100, 700, [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 600, 700]),
        ([10, 100], 100, 200, [10, 11, 12, 14, 18, 26, 42, 74, 200]),
        (None, 3, 7, [3, 6]),
    ],
)
def test_steps_of_the_window(window: Any, interval: int, last: int, expected: list[int]) -> None:
    schedule = SaveSchedule(CheckpointConfig(window=window, interval=interval), power2(None))
    assert [step for step in range(last + 1) if schedule.by_step(step)] == expected


def test_minutes_by_a_clock() -> None:
    now = [0.0]
    schedule = SaveSchedule(CheckpointConfig(minutes=2), power2(None), clock=lambda: now[0])
    assert not schedule.by_time()
    now[0] = 120.0
    assert schedule.by_time()
    schedule.saved()
    assert not schedule.by_time()


def thirds(options: None) -> Any:
    return lambda offset: offset % 3 == 0


def test_a_strategy_of_somebody_else(tmp_path: Path) -> None:
    part = Component(category="save_strategy", name="thirds", target="test_commands:thirds")
    sys.modules.setdefault("test_commands", sys.modules[__name__])
    mine = plugin_object(forge_components=[part])
    plugins = isolated_plugins({"checkpoint": forge_ckpt.plugin, "mine": mine})
    table = {"window": [1, 7], "strategy": "mine/thirds", "interval": 100, "keep_last": 1}
    config = tiny_config(
        plugins=plugins, checkpoint=table, mine=True, run={"name": "a"}, train={"max_steps": 9}
    )
    run_tiny(config, plugins, folder=tmp_path)
    kept_steps = [name for name in names(tmp_path) if name.startswith("step_")]
    assert kept_steps == ["step_00000001", "step_00000004", "step_00000007", "step_00000009"]


def manifest(step: int, serial: int, loss: float | None = None, milestone: bool = False) -> Manifest:
    metrics = {} if loss is None else {"eval/loss": loss}
    return Manifest(
        step=step,
        kind="scheduled",
        serial=serial,
        world_size=1,
        saved_at="",
        files={},
        metrics=metrics,
        milestone=milestone,
    )


def test_rules_of_retention_by_hand() -> None:
    found = [
        ("a", manifest(100, 1, 3.0)),
        ("b", manifest(900, 2, 1.0)),  # best
        ("c", manifest(1000, 3)),  # every 1000
        ("d", manifest(1100, 4, 2.0, milestone=True)),
        ("e", manifest(50, 5, 2.5)),  # saved last but one, whatever its number
        ("f", manifest(60, 6)),
    ]
    rules = CheckpointConfig(keep_last=1, keep_every=1000, keep_best=1)
    assert kept(found, rules, "f") == {"b", "c", "d", "f"}
    assert kept(found, CheckpointConfig(keep_last=2), "f") == {"d", "e", "f"}
    best = CheckpointConfig(keep_last=1, keep_best=1, best_mode="max")
    assert kept(found, best, "f") == {"a", "d", "f"}
    assert kept(found, CheckpointConfig(keep_last=0), "f") == set("abcdef")


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"window": [5, 5]}, "first below last"),
        ({"resume": True}, "auto, a path or false"),
        ({"weights_only": True}, "neither is given"),
        ({"resume": "x", "start_from": "y"}, "clashes with resume"),
        ({"keep_best": 1, "interval": 10}, "do not meet evaluations"),
        ({"strategy": "power3"}, "power2"),
    ],
)
def test_what_does_not_go_together(table: dict[str, Any], words: str) -> None:
    plugins = isolated_plugins({"checkpoint": forge_ckpt.plugin})
    with pytest.raises(ConfigError, match=words):
        tiny_config(plugins=plugins, checkpoint=table, eval={"interval": 3})


@pytest.mark.parametrize(("flag", "value"), [("false", False), ("auto", "auto"), ("runs/b", "runs/b")])
def test_resume_as_a_flag(flag: str, value: Any) -> None:
    plugins = isolated_plugins({"checkpoint": forge_ckpt.plugin})
    config = tiny_config(f"--checkpoint.resume={flag}", plugins=plugins, checkpoint=True)
    assert config[CheckpointConfig].resume == value
