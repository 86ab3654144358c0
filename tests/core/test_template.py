"""`forge new`, the tutorial and the example: installed with pip, tested and trained as a stranger would."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forge_core.commands.main import main
from forge_core.commands.new import render, template
from forge_core.errors import ForgeError, UsageError

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
EXAMPLES = sorted(path.parent for path in ROOT.glob("examples/*/pyproject.toml"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Site:
    """A folder that a package is installed into, and commands that see it."""

    def __init__(self, project: Path, folder: Path) -> None:
        self.project, self.folder = project, folder
        self.run(
            "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index",
            "--disable-pip-version-check", "--target", str(folder), str(project),
        )  # fmt: skip

    def run(self, *arguments: str, cwd: Path | None = None) -> str:
        path = os.pathsep.join([str(self.folder), *filter(None, sys.path)])
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            cwd=cwd or self.project,
            capture_output=True,
            text=True,
            timeout=110,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def forge(self, *arguments: str) -> str:
        return self.run("-m", "forge_core", *arguments)

    def pytest(self) -> str:
        options = ["-q", "-p", "no:cacheprovider", "-W", "error", "--rootdir", str(self.project)]
        return self.run("-m", "pytest", *options, "tests")


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of the fenced blocks of a page."""
    for match in FENCE.finditer(page.read_text(encoding="utf-8")):
        yield match[1], match[2]


def train_three(site: Site, plugin: str) -> list[dict[str, float]]:
    """Three updates on the default corpus that name the plugin; the lines of metrics.jsonl."""
    tiny = [
        "--model.dim=32",
        "--model.n_layers=2",
        "--train.seq_len=64",
        "--train.batch_size=2",
        "--eval.steps=1",
    ]
    quick = ["--train.max_steps=3", "--eval.sample_tokens=0", "--metrics.log_interval=1", "--run.name=three"]
    site.forge("train", "quickstart", f"--{plugin}=true", *tiny, *quick)
    run = site.project / "runs" / "three"
    assert plugin in json.loads((run / "plugins.json").read_text())["plugins"]
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_new_family_installs_passes_its_tests_and_trains(tmp_path: Path) -> None:
    assert main(["new", "my_family", "--dir", str(tmp_path)]) == 0
    site = Site(tmp_path / "forge-my-family", tmp_path / "site")
    assert "my_family  forge-my-family 0.1.0  works" in site.forge("plugins")
    assert re.search(r"\d+ passed", site.pytest())
    records = train_three(site, "my_family")
    assert {"train/loss", "my_family/largest_weight"} <= records[0].keys()


def test_a_new_family_is_named_throughout(tmp_path: Path) -> None:
    folder = render("my_family", tmp_path)
    files = {
        path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()
    }
    assert set(files) == {
        "README.md",
        "pyproject.toml",
        "src/forge_my_family/__init__.py",
        "src/forge_my_family/ffn.py",
        "src/forge_my_family/plugin.py",
        "tests/test_plugin.py",
    }
    assert not any(re.search("newfamily", text, re.I) for text in files.values())
    assert "class MyFamilyConfig" in files["src/forge_my_family/plugin.py"]
    for name, text in files.items():
        if name.endswith(".py"):
            compile(text, name, "exec")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("My-Family", "for example my_family"),
        ("forge-mine", "for example mine"),
        ("9lives", "no name for a table"),
        ("class", "no name for a table"),
        ("train", "is a table of forge-core"),
        ("core", "is a table of forge-core"),
        ("", "no name for a table"),
    ],
)
def test_bad_names_are_refused(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        render(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_are_taken_missing_or_closed_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    render("mine", tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(["new", "mine", "--dir", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["new", "mine", "--dir", str(tmp_path / "nowhere")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ForgeError, match="No space left on device"):
        render("other", tmp_path)
    assert sorted(tmp_path.rglob("*")) == before, "nothing half-written stays"


def test_an_installed_package_carries_the_template(tmp_path: Path) -> None:
    """The wheel and the source distribution hold it; a wheel made from the source distribution, too."""
    source = ROOT / "packages" / "forge-core"
    if not (source / "hatch_build.py").exists():
        pytest.skip("not a checkout")
    wanted = {path.relative_to(template()).as_posix() for path in template().rglob("*") if path.is_file()}
    wanted = {path for path in wanted if "__pycache__" not in path}

    def build(folder: Path, kind: str) -> Path:
        out = tmp_path / f"{kind}-of-{folder.name}"
        command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(out)]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
        (made,) = out.iterdir()
        return made

    def names(archive: Path) -> set[str]:
        into = tmp_path / f"{archive.parent.name}-unpacked"
        if archive.suffix == ".whl":
            shutil.unpack_archive(archive, into, "zip")
            root = into / "forge_core" / "_template"
        else:
            shutil.unpack_archive(archive, into, filter="data")
            (top,) = into.iterdir()
            root = top / "_template"
        return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}

    assert names(build(source, "wheel")) == wanted
    distribution = build(source, "sdist")
    assert names(distribution) == wanted
    (unpacked,) = (tmp_path / f"{distribution.parent.name}-unpacked").iterdir()
    assert names(build(unpacked, "wheel")) == wanted


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_an_example_installs_passes_its_tests_and_trains(example: Path, tmp_path: Path) -> None:
    project = shutil.copytree(example, tmp_path / example.name, ignore=shutil.ignore_patterns("__pycache__"))
    site = Site(project, tmp_path / "site")
    assert re.search(r"\d+ passed", site.pytest())
    plugin = example.name.removeprefix("forge-").replace("-", "_")
    train_three(site, plugin)
    site.forge("check", "run.toml")


def test_the_tutorial_works_as_it_is_written(tmp_path: Path) -> None:
    """Every file of the page, then every command of it, in order."""
    project = tmp_path / "forge-shift"
    commands: list[str] = []
    for language, text in blocks(DOCS / "write-a-family.md"):
        if language == "console":
            commands += [line.removeprefix("$ ") for line in text.splitlines() if line.startswith("$ ")]
            continue
        first, _, rest = text.partition("\n")
        found = re.fullmatch(r"# file: (\S+)( \(continued\))?", first)
        assert found, f"a block of {language} says no file: {first}"
        path = project / found[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        before = path.read_text() + "\n\n" if found[2] else ""
        path.write_text(before + rest)
    assert [command for command in commands if command.startswith("pip install")], "the page installs it"
    site = Site(project, tmp_path / "site")
    small = ["--model.dim=32", "--train.batch_size=2", "--eval.steps=1"]
    for command in commands:
        program, *arguments = command.split()
        if program == "forge":
            site.forge(*arguments, *(small if arguments[0] == "train" else []))
        elif command == "python -m pytest":
            assert re.search(r"\d+ passed", site.pytest())
        else:
            assert command.startswith("pip install"), command
    lines = (project / "runs" / "first" / "metrics.jsonl").read_text().splitlines()
    assert {"loss/shift", "shift/share"} <= json.loads(lines[0]).keys()
