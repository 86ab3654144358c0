"""What an update saw, computed again from the folder of a run."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from forge_core.commands.data_inspect import _runs
from forge_core.commands.loading import load
from forge_core.commands.main import main
from forge_core.config import Config
from forge_core.data.best_fit import BestFitTokens
from forge_core.data.inspect_step import SeenSample, seen_in_step
from forge_core.data.inspection import decode_sample
from forge_core.data.journal import find_start, note_start
from forge_core.data.packing import PackedTokens
from forge_core.data.row import Shard, TokenRow
from forge_core.data.tokenizer import ByteTokenizer
from forge_core.errors import DataError, ForgeError
from forge_core.plugins import PluginCatalog, load_object
from forge_core.testing import TinyRun, run_tiny, tiny_config


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"text number {i}, and more of it\n" * 4)
    return str(folder)


def make_config(corpus: str, *flags: str) -> Config:
    synthetic = {"n_samples": 300, "vocab_size": 50}
    return tiny_config(
        *flags,
        data={
            "mix": [
                {"name": "words", "source": "text", "path": corpus, "weight": 2.0},
                {"name": "noise", "source": "synthetic", "weight": 1.0, "synthetic": synthetic},
            ],
            "phases": [{"start_step": 3, "weights": {"words": 1.0}}],
            "holdout": 0.1,
        },
        model={"vocab_size": 257},
        train={"batch_size": 3, "grad_accum_steps": 2},
    )


def trained(corpus: str, folder: Path, steps: int = 4) -> TinyRun:
    return run_tiny(make_config(corpus, f"--train.max_steps={steps}"), folder=folder)


def seen(run: Path, step: int) -> list[SeenSample]:
    config, plugins = load(str(run / "config.toml"), [])
    catalog = PluginCatalog(plugins)

    def component(category: str, name: str) -> Any:
        return load_object(catalog.component(category, name).target)

    return seen_in_step(run, config, component, step)


def test_an_update_is_shown_as_it_was(corpus: str, tmp_path: Path) -> None:
    run = trained(corpus, tmp_path / "runs")
    recent = dict(run.session.stream.recent)  # type: ignore[attr-defined]
    assert set(recent) == {6, 12, 18}  # of the last three updates, 6 samples each
    for step in (2, 3, 4):
        found = seen(run.folder, step)
        batches = recent[(step - 1) * 6]
        assert [each.tokens for each in found] == [row for b in batches for row in b["tokens"].tolist()]
        assert [each.position for each in found] == list(range((step - 1) * 6, step * 6))
        assert [each.micro_batch for each in found] == [0, 0, 0, 1, 1, 1]
        assert [each.row for each in found] == [0, 1, 2, 0, 1, 2]
        names = [("words", "noise")[s] for b in batches for s in b["sources"].tolist()]
        assert [each.source for each in found] == names
        for each in found:
            if each.source == "words":
                assert each.documents
                lines = {f"text number {int(name[:2])}, and more of it" for name in each.documents}
                whole = "".join((line + "\n") * 4 for line in sorted(lines))
                assert each.text in whole or len(each.documents) > 1
            assert each.supervised <= 16
    assert {each.source for each in seen(run.folder, 3)} == {"words"}


def test_updates_after_a_restart_on_other_ranks_and_weights(corpus: str, tmp_path: Path) -> None:
    run = trained(corpus, tmp_path / "runs")
    first = [each.sample for each in seen(run.folder, 3)]
    session = run.session
    session.ranks = type(session.ranks)(rank=0, world_size=2, data_rank=0, data_size=2)
    session.config = session.config.replace(train=type(session.config.get("train"))(batch_size=1))
    # as if the run had been started again after update 4, on two ranks with a batch of one
    note_start(session, 4)
    line = find_start(run.folder, 5)
    assert (line["step"], line["data_ranks"], line["batch_size"]) == (4, 2, 1)
    assert find_start(run.folder, 4)["step"] == 0
    assert [each.sample for each in seen(run.folder, 3)] == first


def test_a_full_disk_leaves_the_starts_that_were_written_down(corpus: str, tmp_path: Path) -> None:
    """A limit on the size of files stands in for the disk: it lets a part of the new line through."""
    run = trained(corpus, tmp_path / "runs", steps=1)
    before = (run.folder / "data.jsonl").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, limits[1]))
    try:
        with pytest.raises(ForgeError, match=r"cannot write .*data\.jsonl: File too large"):
            note_start(run.session, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (run.folder / "data.jsonl").read_bytes() == before


def test_what_can_no_longer_be_known_is_refused(corpus: str, tmp_path: Path) -> None:
    run = trained(corpus, tmp_path / "runs")
    with pytest.raises(DataError, match="ends after update 4, before update 5"):
        seen(run.folder, 5)
    with pytest.raises(DataError, match=r"holds no data\.jsonl"):
        find_start(tmp_path, 1)
    (Path(corpus) / "17.txt").write_text("other words\n" * 20)
    with pytest.raises(DataError, match=r"source words: .*fingerprint was"):
        seen(run.folder, 2)
    text = (run.folder / "config.toml").read_text()
    (run.folder / "config.toml").write_text(text.replace("weight = 2.0", "weight = 5.0"))
    with pytest.raises(DataError, match="under a configuration of data that"):
        seen(run.folder, 2)


def test_command_prints_text_or_json(corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(corpus, tmp_path / "runs")
    assert main(["data", "inspect", str(run.folder), "--step", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("update 3: 6 sequences, 96 tokens, samples from 12")
    assert "micro-batch 1 rank 0 row 2: sample" in out
    assert ".txt" in out
    assert main(["data", "inspect", str(run.folder), "--step", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == 3
    assert [each["sample"] for each in found["samples"]] == [each.sample for each in seen(run.folder, 3)]
    assert main(["data", "inspect", str(tmp_path), "--step", "3"]) == 2
    assert "is no folder of a run" in capsys.readouterr().err


def test_parts_of_a_mixture_are_shown(
    corpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = trained(corpus, tmp_path / "runs", steps=1)
    capsys.readouterr()
    assert main(["data", "inspect", str(run.folder), "--samples", "0"]) == 0
    out = capsys.readouterr().out
    assert "weight 2, 66.7% of the samples from update 1 on, 100.0% of the samples from update 3 on" in out
    assert "weight 1, 33.3% of the samples from update 1 on, 0.0% of the samples from update 3 on" in out


def test_sources_name_the_documents_of_a_sample() -> None:
    rows = [np.append(np.full(length - 1, i + 1), 0) for i, length in enumerate((5, 3, 12, 4))]
    tokens = np.concatenate(rows).astype(np.uint16)
    index = np.cumsum([0, 5, 3, 12, 4])
    titled = Shard(name="s", tokens=tokens, documents=index, titles=["a", "b", "c", "d"])
    packed = PackedTokens(TokenRow([titled], end=0), end=0, seq_len=8)
    # tokens 0..7 are a and b, 8..15 lie in c, and the last sample ends with the row: 15..22 are c and d
    assert [packed.documents_of(i) for i in range(3)] == [["a", "b"], ["c"], ["c", "d"]]
    fitted = BestFitTokens(TokenRow([Shard(name="s", tokens=tokens, documents=index)], end=0), seq_len=8)
    found = [set(fitted.documents_of(i)) for i in range(len(fitted))]
    for i, names in enumerate(found):
        present = set(fitted[i]["tokens"].tolist()) - {0}
        assert names == {f"s document {number - 1}" for number in present}
    plain = PackedTokens(tokens, end=0, seq_len=8, name="s")
    assert plain.documents_of(1) == ["s tokens 8..15"]


def test_padding_is_no_document() -> None:
    """Rows of 8 tokens: the row with 3 tokens of a document has 5 of padding behind it."""
    tokens = np.array([1, 1, 1, 1, 1, 1, 0, 2, 2, 0], dtype=np.uint16)
    shard = Shard(name="s", tokens=tokens, documents=np.array([0, 7, 10]))
    fitted = BestFitTokens(TokenRow([shard], end=0), seq_len=8)
    rows = [decode_sample(fitted[i], ByteTokenizer()) for i in range(len(fitted))]
    for row in rows:
        *real, last = row
        assert all(run.document is not None for run in real)
        assert (last.document, last.learnt, last.text) == (None, False, "")
        assert sum(run.tokens for run in row) == 8
    assert sorted(row[-1].tokens for row in rows) == [1, 5]
    assert _runs([attrs.asdict(run) for run in rows[0]])[-1].split() == ["padding", str(rows[0][-1].tokens)]
