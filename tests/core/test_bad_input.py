"""Bad input ends with one clear line, the right status, and nothing half-written that looks whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOBODY = 65534
TINY = (
    "--model.dim=16",
    "--model.n_layers=1",
    "--model.n_heads=2",
    "--model.ffn_hidden_dim=32",
    "--train.seq_len=8",
    "--train.batch_size=4",
    "--train.max_steps=2",
    "--eval.steps=1",
    "--eval.sample_tokens=0",
)


def forge(
    *arguments: str, cwd: Path, user: int | None = None, preamble: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run the command line, as another user where asked."""
    code = f"import os, sys\n{preamble}\n"
    if user is not None:
        # imported first: another user may not even be allowed to read this Python
        code += "from forge_core.commands.main import main\nmain(['check', 'quickstart'])\n"
        code += f"os.setegid({user}); os.seteuid({user})\n"
    code += "from forge_core.commands.main import run\nrun()"
    environment = {**os.environ, "HOME": str(cwd), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=100,
        env=environment,
    )


def assert_refused(
    result: subprocess.CompletedProcess[str], status: int, *words: str, problems: int = 1
) -> None:
    assert result.returncode == status, result.stderr
    assert "Traceback" not in result.stderr
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == problems, result.stderr
    for word in words:
        assert word in result.stderr


def test_missing_file(tmp_path: Path) -> None:
    assert_refused(forge("train", "absent.toml", cwd=tmp_path), 2, "absent.toml")


def test_toml_syntax(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text("[train]\nseq_len = = 3\n")
    assert_refused(forge("check", "bad.toml", cwd=tmp_path), 2, "bad.toml", "2")


def test_unknown_table_names_the_tables_of_plugins(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[nonsense]\nx = 1\n")
    result = forge("check", "a.toml", cwd=tmp_path)
    assert_refused(result, 2, "nonsense")


def test_wrong_types_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text(
        '[train]\nseq_len = 10.5\nmax_steps = true\n[optimizer]\nlr = "1e-4"\nlrr = 1\n'
    )
    result = forge("check", "a.toml", cwd=tmp_path)
    words = ("train.seq_len", "train.max_steps", "optimizer.lr", "optimizer.lrr")
    assert_refused(result, 2, *words, problems=4)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody who may not read the file")
def test_unreadable_configuration(tmp_path: Path) -> None:
    path = tmp_path / "secret.toml"
    path.write_text("[train]\n")
    path.chmod(0)
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents:
        if parent.name.startswith("pytest"):
            parent.chmod(0o755)
    assert_refused(forge("check", str(path), cwd=Path("/"), user=NOBODY), 2, "secret.toml")


def test_empty_corpus(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    result = forge("train", "--data.path=corpus", *TINY, cwd=tmp_path)
    assert_refused(result, 2, "corpus")
    assert not (tmp_path / "runs").exists()


def test_corpus_smaller_than_a_batch(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0123456789")
    result = forge("train", "--data.path=a.txt", "--data.holdout=0", *TINY, cwd=tmp_path)
    assert_refused(result, 2, "2 samples", "batch of 4")
    assert not (tmp_path / "runs").exists()


def test_full_disk_while_writing_metrics(tmp_path: Path) -> None:
    """A limit on file size stands in for the disk; whatever was written before stays whole."""
    preamble = (
        "import resource, signal\n"
        "import torch\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))\n"
    )
    flags = ("--run.name=full", "--data.source=synthetic", "--metrics.log_interval=1", "--eval.at_end=false")
    result = forge("train", *TINY, *flags, "--train.max_steps=200", cwd=tmp_path, preamble=preamble)
    assert_refused(result, 1, "metrics.jsonl", "File too large")
    for line in (tmp_path / "runs" / "full" / "metrics.jsonl").read_text().splitlines():
        json.loads(line)
    assert json.loads((tmp_path / "runs" / "full" / "exit.json").read_text())["status"] == 1


def test_run_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    result = forge("train", "--data.source=synthetic", *TINY, cwd=tmp_path)
    assert_refused(result, 2, "run.dir: cannot make the run folder runs/")

    (tmp_path / "runs").unlink()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "a").write_text("")
    result = forge("train", "--data.source=synthetic", "--run.name=a", *TINY, cwd=tmp_path)
    assert_refused(result, 2, "run.dir: cannot make the run folder runs/a")


def test_taken_run_folder(tmp_path: Path) -> None:
    flags = ("--data.source=synthetic", "--run.name=a", *TINY)
    assert forge("train", *flags, cwd=tmp_path).returncode == 0
    assert_refused(forge("train", *flags, cwd=tmp_path), 2, "already holds a run")


def test_unknown_command(tmp_path: Path) -> None:
    assert_refused(forge("trian", cwd=tmp_path), 2, "did you mean 'train'")
