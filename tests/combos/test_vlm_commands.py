"""`forge generate` with pictures and `forge eval` with the metrics of a model that sees, from a saved run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge_core.plugins import Plugins
from forge_core.testing import run_tiny

pytestmark = pytest.mark.packages("ckpt", "vlm")
METRICS = ["exact_match", "vqa_accuracy", "relaxed_accuracy", "caption_loss", "multiple_choice"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A saved run of three updates, whose last evaluation measured everything."""
    from vlmkit import config_of, write_samples

    records = [
        {"image": f"{n % 6}.png", "prompt": f"q{n} ", "choices": ["yes", "no"], "answer": n % 2}
        for n in range(24)
    ]
    folder = write_samples(tmp_path_factory.mktemp("samples"), records)
    plugins = Plugins()
    tables: dict[str, Any] = {
        "run": {"name": "seeing"},
        "data": {"holdout": 0.4},
        "vlm": {"answer_tokens": 4, "metrics": METRICS},
        "eval": {"steps": 0},
        "checkpoint": {"interval": 3, "mode": "sync"},
    }
    place = tmp_path_factory.mktemp("runs")
    return folder, run_tiny(config_of(folder, plugins, **tables), plugins, folder=place)


def forge(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    from forge_core.commands.main import main

    capsys.readouterr()
    status = main([*arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_generate_takes_pictures(run: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder, done = run
    place, greedy = str(done.folder), ["--temperature=0", "--max-new-tokens=6", "--json"]
    expected = done.session.generator.generate(
        done.session,
        [{"prompt": f"q{n} ", "images": [folder / f"{n}.png"]} for n in range(2)],
        max_new_tokens=6,
        temperature=0.0,
    )
    for number in range(2):
        image = f"--image={folder}/{number}.png"
        status, out, err = forge(capsys, "generate", place, image, f"--prompt=q{number} ", *greedy)
        assert status == 0, err
        assert json.loads(out) == {"prompt": f"q{number} ", "text": expected[number]}
    lines = [json.dumps({"prompt": f"q{n} ", "images": [f"{folder}/{n}.png"]}) for n in range(2)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    status, out, err = forge(capsys, "generate", place, f"--prompts={tmp_path}/prompts.jsonl", *greedy)
    assert status == 0, err
    assert [json.loads(line)["text"] for line in out.splitlines()] == expected


def test_generate_says_what_is_not_there(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, done = run
    status, _, err = forge(capsys, "generate", str(done.folder), "--image=lost.png", "--prompt=q ")
    assert status != 0
    assert "there is no image lost.png" in err


def test_eval_measures_what_the_run_did(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    _, done = run
    status, out, err = forge(capsys, "eval", str(done.folder), "--json")
    assert status == 0, err
    found = json.loads(out)
    for name in METRICS:
        assert found[f"eval/{name}"] == pytest.approx(done.metric(f"eval/{name}")[-1], rel=1e-6), name
