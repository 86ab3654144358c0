"""`forge export`, `import`, `generate` and `eval`, as they are typed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import ckptkit
import pytest
import torch

from forge_ckpt.hf.opening import open_model
from forge_ckpt.hf.using import evaluate_sets, generate, using
from forge_core.commands.main import COMMANDS, find, main
from forge_core.testing import TinyRun, tiny_config

TABLES: dict[str, Any] = {
    "model": {"vocab_size": 257, "max_seq_len": 48},
    "data": {"source": "text", "tokenizer": "bytes"},
    "test": False,
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """A run on bytes, whose configuration names nothing but installed plugins."""
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "text"
    text.mkdir()
    for i in range(8):
        (text / f"{i}.txt").write_text(f"The number is {i}. " * 40)
    return ckptkit.run(folder, steps=2, **{**TABLES, "data": {**TABLES["data"], "path": str(text)}})


def forge(capsys: pytest.CaptureFixture[str], *words: object) -> list[str]:
    """Run a command and return its lines."""
    status = main([str(word) for word in words])
    out, err = capsys.readouterr()
    assert status == 0, err
    return out.splitlines()


@pytest.fixture(scope="module")
def folders(ran: TinyRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The run, its checkpoint, its export, and that imported."""
    place = tmp_path_factory.mktemp("folders")
    assert main(["export", str(ran.folder), "--out", str(place / "hf")]) == 0
    assert main(["import", str(place / "hf"), "--out", str(place / "ours")]) == 0
    checkpoint = ran.folder / "checkpoints" / "step_00000002"
    return {"run": ran.folder, "checkpoint": checkpoint, "hf": place / "hf", "imported": place / "ours"}


def test_generation_is_the_same_from_every_folder(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = (
        "--prompt",
        "The number",
        "--prompt",
        "",
        "--max-new-tokens",
        "9",
        "--temperature",
        "0",
        "--json",
    )
    said = {kind: forge(capsys, "generate", place, *words) for kind, place in folders.items()}
    assert len(set(map(tuple, said.values()))) == 1, said
    first, second = (json.loads(line) for line in said["run"])
    assert first["prompt"] == "The number"
    assert len(second["text"]) <= 9
    plain = forge(capsys, "generate", folders["hf"], *words[:-1])
    assert plain[0].startswith("The number")


def test_generation_follows_the_loaded_weights(ran: TinyRun, folders: dict[str, Path]) -> None:
    """Greedy, against the trained model asked token by token."""
    with using(open_model(folders["hf"])) as session:
        [text] = generate(session, ["The "], max_new_tokens=6, temperature=0.0)
    model: Any = ran.session.model.eval()
    ids = list(b"The ")
    with torch.no_grad():
        for _ in range(6):
            ids.append(int(model.logits(model(torch.tensor([ids]))[:, -1]).argmax()))
    assert text == bytes(i for i in ids[4:] if i < 256).decode(errors="replace")


def test_the_page_says_how_to_get_logits(ran: TinyRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines run as they stand, and give what the trained model gives."""
    page = (Path(__file__).parents[2] / "docs/hugging-face.md").read_text(encoding="utf-8")
    section = page.split("### Logits in Python\n")[1]
    code = textwrap.dedent("\n".join(re.findall(r"^(?:    .*)?$", section.split("\nThe place")[0], re.M)))
    folder = ran.folder.parent.parent / "linked"
    (folder / "runs").mkdir(parents=True)
    (folder / "runs/mine").symlink_to(ran.folder.resolve())
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    exec(compile(code, "hugging-face.md", "exec"), names)
    model: Any = ran.session.model.eval()
    with torch.no_grad():
        expected = model.logits(model(torch.tensor([list(b"The number")])))
    torch.testing.assert_close(names["scores"], expected)
    assert names["scores"].shape == (1, 10, 257)
    assert isinstance(names["likely"], str)


def test_sampling_is_seeded_and_prompts_come_from_files(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"prompt": "two"}\n')
    words = ("generate", folders["imported"], "--prompts", file, "--max-new-tokens", 12, "--top-k", 20)
    one = forge(capsys, *words, "--top-p", 0.9, "--json")
    assert one == forge(capsys, *words, "--top-p", 0.9, "--json")
    assert one != forge(capsys, *words, "--top-p", 0.9, "--json", "--seed", 1)
    assert [json.loads(line)["prompt"] for line in one] == ["one", "two"]
    file.write_text('{"promt": "one"}\n')
    assert main([str(word) for word in words]) == 2
    assert 'under "prompt"' in capsys.readouterr().err


def test_losses_that_are_no_numbers_are_null_in_json(
    folders: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"eval/loss": float("nan"), "eval/perplexity": float("inf"), "eval/share": 0.5}
    monkeypatch.setattr("forge_ckpt.hf.using.evaluate_sets", lambda session, sets: found)
    [line] = forge(capsys, "eval", folders["run"], "--json")
    assert json.loads(line, parse_constant=pytest.fail) == {
        "eval/loss": None,
        "eval/perplexity": None,
        "eval/share": 0.5,
    }


def test_evaluation_is_that_of_the_run(
    ran: TinyRun, folders: dict[str, Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    [line] = forge(capsys, "eval", folders["run"], "--json")
    found = json.loads(line)
    from forge_core.loop.evaluate import evaluate

    with using(open_model(folders["run"]), data=True) as session:
        expected = evaluate(session)
        assert evaluate_sets(session) == expected
    assert found == pytest.approx(expected)
    [line] = forge(capsys, "eval", folders["hf"], "--config", ran.folder / "config.toml", "--json")
    assert json.loads(line)["eval/loss"] == pytest.approx(found["eval/loss"], rel=1e-6)
    lines = forge(capsys, "eval", folders["checkpoint"])
    assert lines[0].split()[0] == "eval/loss"
    assert main(["eval", str(folders["run"]), "--sets", "nothing"]) == 2
    told = capsys.readouterr().err
    assert "no evaluation set is called 'nothing'" in told
    assert "known: " in told
    for place in ("hf", "imported"):
        assert main(["eval", str(folders[place])]) == 2
        assert "no data to evaluate them on" in capsys.readouterr().err


def test_one_of_several_sets(ran: TinyRun, folders: dict[str, Path], tmp_path: Path) -> None:
    config = tmp_path / "sets.toml"
    text = ran.session.config.get("data").path
    sets = "".join(
        f'\n[[eval.sets]]\nname = "{name}"\nsource = "text"\npath = "{text}"\n' for name in ("a", "b")
    )
    config.write_text(
        f'extends = "{folders["imported"]}/model.toml"\n[data]\npath = "{text}"\n'
        f'[train]\nseq_len = 16\ndevice = "cpu"\n[eval]\nsample_tokens = 8\n{sets}'
    )
    from forge_ckpt.hf.using import with_config

    opened = with_config(open_model(folders["imported"]), str(config), [])
    with using(opened, data=True) as session:
        both = evaluate_sets(session)
    with using(opened, data=True) as session:
        one = evaluate_sets(session, ["b"])
    assert {"eval/a/loss", "eval/b/loss"} <= both.keys()
    assert "eval/a/loss" not in one
    assert one["eval/b/loss"] == both["eval/b/loss"]


def test_a_run_of_many_ranks_is_used_by_one(folders: dict[str, Path], tmp_path: Path) -> None:
    """Its sizes are laid aside: weights are whole in a checkpoint."""
    import shutil

    place = tmp_path / "run"
    shutil.copytree(folders["run"], place)
    config = place / "checkpoints" / "step_00000002" / "config.toml"
    text = config.read_text()
    assert "tp = 1" in text
    config.write_text(text.replace("tp = 1", "tp = 2"))
    opened = open_model(place, plugins=ckptkit.plugins_for())
    assert opened.config.get("distributed").tp == 2
    with using(opened) as session:
        assert session.ranks.world_size == 1


def test_a_run_can_be_exported_where_its_data_and_tokenizer_are_not(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    place = tmp_path / "run"
    shutil.copytree(folders["run"], place)
    config = place / "checkpoints" / "step_00000002" / "config.toml"
    text = config.read_text().replace('tokenizer = "bytes"', 'tokenizer = "a.jsn"').replace("/text", "/gone")
    config.write_text(text)
    lines = forge(capsys, "export", place, "--out", tmp_path / "hf")
    assert "note: there is no tokenizer beside the model, and none was written" in lines
    assert (tmp_path / "hf/model.safetensors").read_bytes() == (
        folders["hf"] / "model.safetensors"
    ).read_bytes()
    assert main(["generate", str(place), "--prompt", "x"]) == 2
    assert "a.jsn" in capsys.readouterr().err
    forge(capsys, "generate", place, "--prompt", "x", "--data.tokenizer=bytes", "--max-new-tokens", 2)


def test_a_tokenizer_that_is_a_file_of_any_name_is_exported(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not the one of another model that lies beside it."""
    import shutil

    tokenizers = pytest.importorskip("tokenizers")
    shutil.copyfile(folders["hf"] / "tokenizer.json", tmp_path / "mine.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    place = tmp_path / "run"
    shutil.copytree(folders["run"], place)
    config = place / "checkpoints" / "step_00000002" / "config.toml"
    text = config.read_text().replace('tokenizer = "bytes"', f'tokenizer = "{tmp_path / "mine.json"}"')
    config.write_text(text)
    forge(capsys, "export", place, "--out", tmp_path / "hf")
    written = tokenizers.Tokenizer.from_file(str(tmp_path / "hf/tokenizer.json"))
    assert written.encode("ab").ids == [97, 98]
    about = json.loads((tmp_path / "hf/tokenizer_config.json").read_text())
    assert (about["tokenizer_class"], about["eos_token"]) == ("PreTrainedTokenizerFast", "<|endoftext|>")
    assert json.loads((tmp_path / "hf/config.json").read_text())["eos_token_id"] == 256


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("export", "{hf}", "--out", "{new}", "--dtype", "int4"), "no floating-point type"),
        (("export", "{run}", "--out", "{hf}"), "is there already"),
        (("export", "{run}", "--out", "{new}", "--max-shard-size", "big"), "is no size"),
        (("import", "{run}", "--out", "{new}"), "config.json"),
        (("import", "gpt2", "--out", "{new}"), "hf download NAME --local-dir DIR"),
        (("generate", "{nowhere}"), "there is no folder"),
        (("generate", "{run}", "--prompt", "x", "--max-new-tokens", "100"), "max_seq_len = 48"),
        (("generate", "{run}", "--temperature", "-1"), "temperature"),
    ],
)
def test_errors_are_a_line(
    words: tuple[str, ...],
    said: str,
    folders: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    places = {**folders, "new": tmp_path / "new", "nowhere": tmp_path / "nowhere"}
    assert main([word.format(**places) for word in words]) in (1, 2)
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not (tmp_path / "new").exists()


def test_commands_import_no_torch() -> None:
    names = ("export", "importing", "generate", "evaluating")
    imports = "".join(f"import forge_ckpt.hf.commands.{name}\n" for name in names)
    code = f"import sys\n{imports}sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    for name in ("export", "import", "generate", "eval"):
        assert name not in COMMANDS
        assert find(name).examples.startswith("examples:")


def test_a_table_of_an_import_trains(folders: dict[str, Path], tmp_path: Path) -> None:
    """What the command says at its end is a configuration that works."""
    from forge_core.commands.loading import load

    config = tmp_path / "mine.toml"
    config.write_text(
        f'extends = "{folders["imported"]}/model.toml"\n[model]\ninit_from = "{folders["imported"]}"\n'
        "[train]\nseq_len = 16\n[eval]\nsample_tokens = 8\n[checkpoint]\n"
    )
    loaded, plugins = load(str(config), [])
    assert "checkpoint" in plugins.loaded
    assert loaded.get("model").dim == tiny_config().get("model").dim
