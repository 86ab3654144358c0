"""The same documents through every source: the same losses; and what the commands show of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sourcekit import python_sources, spec_of, write_jsonl

from forge_core.commands.main import main
from forge_core.data.corpus import find_documents, split_documents
from forge_core.data.options import ChatOptions, JsonlOptions, SyntheticOptions, TextOptions, TokensOptions
from forge_core.data.prepare.job import Job
from forge_core.data.prepare.run import prepare
from forge_core.errors import DataError
from forge_core.plugins.catalog import load_object
from forge_core.testing import run_tiny, tiny_config

STEPS = {"max_steps": 3, "seq_len": 32, "batch_size": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of text, the same as JSONL and as tokens, in one order."""
    root = tmp_path_factory.mktemp("sources")
    for i, text in enumerate(python_sources(12, most=4000)):
        (root / "text" / f"{i}.py").parent.mkdir(exist_ok=True)
        (root / "text" / f"{i}.py").write_text(text)
    ordered = split_documents(find_documents(str(root / "text"), ["*"]), 0.0)[0]
    write_jsonl(root / "all.jsonl", ({"text": document.read().decode()} for document in ordered))
    prepare([str(root / "text")], Job(kind="text"), root / "tokens", shard_size=10_000)
    talks = [
        [{"role": "user", "content": f"Say {i}"}, {"role": "assistant", "content": f"I say {i}."}]
        for i in range(60)
    ]
    write_jsonl(root / "chat.jsonl", ({"messages": talk} for talk in talks))
    return root


def losses(folder: Path, source: str, path: str, **data: Any) -> list[float]:
    keys = {"source": source, "path": str(folder / path), "cache_dir": str(folder / "cache"), "holdout": 0.0}
    return run_tiny(tiny_config(data={**keys, **data}, train=STEPS)).losses


@pytest.mark.parametrize("packing", ["concatenate", "best_fit"])
def test_sources_train_alike(folder: Path, packing: str) -> None:
    expected = losses(folder, "text", "text", packing=packing)
    assert len(expected) == 3
    assert losses(folder, "jsonl", "all.jsonl", packing=packing) == expected
    assert losses(folder, "tokens", "tokens", packing=packing) == expected


def test_stream_and_chat_train(folder: Path) -> None:
    pytest.importorskip("datasets")
    streamed = losses(folder, "hf", "all.jsonl", hf={"streaming": True})
    assert len(streamed) == 3
    data = {
        "source": "chat",
        "path": str(folder / "chat.jsonl"),
        "cache_dir": str(folder / "cache"),
        "chat": {"template": "plain"},
        "holdout": 0.2,
    }
    chat = run_tiny(tiny_config(data=data, train=STEPS, eval={"interval": 2}))
    assert len(chat.losses) == 3
    assert chat.metric("eval/loss")


def test_a_run_refuses_tokens_of_another_vocabulary(folder: Path) -> None:
    tokens = {"source": "tokens", "path": str(folder / "tokens")}
    with pytest.raises(
        DataError, match=r"tokens-00000\.npy: token id 256 does not fit model\.vocab_size = 200"
    ):
        run_tiny(tiny_config(data=tokens, model={"vocab_size": 200}, train=STEPS))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["data", "inspect", *arguments]) == 0
    return capsys.readouterr().out


def test_inspect_counts_and_decodes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(shown(capsys, str(folder / "tokens"), "--json", "--samples", "3", "--seq-len", "64"))
    (source,) = told["sources"]
    sizes = sorted(path.stat().st_size + 1 for path in (folder / "text").iterdir())
    lengths = source["lengths"]
    assert source["tokens"] == sum(sizes)
    assert (lengths["documents"], lengths["largest"]) == (12, sizes[-1])
    assert lengths["mean"] == pytest.approx(sum(sizes) / 12)
    # of twelve, the lower median is the sixth
    assert lengths["percentiles"]["50"] == sizes[5]
    for low, below, count in lengths["histogram"]:
        assert count == sum(low <= size < below for size in sizes)
    letters = {c for path in (folder / "text").iterdir() for c in path.read_bytes()}
    assert source["vocabulary"]["distinct"] == len(letters) + 1
    assert source["vocabulary"]["largest"] == 256
    assert [each["sample"] for each in source["shown"]] == [
        0,
        (source["samples"] - 1) // 2,
        source["samples"] - 1,
    ]
    first = split_documents(find_documents(str(folder / "text"), ["*"]), 0.0)[0][0].read().decode()
    assert "".join(run["text"] for run in source["shown"][0]["runs"]) == first[:64]


def test_inspect_shows_edges_and_masks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = shown(
        capsys, str(folder / "chat.jsonl"), "--chat-template", "plain", "--samples", "1", "--seq-len", "80"
    )
    assert re.search(
        r"document 0\n +-- +\d+  User: Say \d+\\nAssistant: \n +learnt +\d+  I say \d+\.\n", page
    )
    assert re.search(r"\d+\.\d+% of the tokens are learnt", page)
    assert "60 documents" in page
    assert "left over" in page


def test_inspect_of_a_configuration_and_of_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = f"--data.path={folder / 'text'}"
    page = shown(capsys, "quickstart", path, "--data.packing=best_fit", "--data.holdout=0.5")
    assert "split train" in page
    assert "left over" in page
    assert "12 documents" in shown(capsys, str(folder / "text"))
    assert main(["data", "inspect", "quickstart", "--tokenizer", "bytes"]) == 2
    assert main(["data", "inspect", str(folder / "text"), "--data.path=x"]) == 2
    assert main(["data", "inspect", str(folder / "nothing")]) == 2


def test_best_fit_needs_documents_kept_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "quickstart", "--data.packing=best_fit", "--data.pack=false"]) == 2
    assert "needs data.pack = true" in capsys.readouterr().err


SOURCES: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    "text": ("forge_core.data.text:build", "text", TextOptions(), {}),
    "text, best fit": ("forge_core.data.text:build", "text", TextOptions(), {"packing": "best_fit"}),
    "text, one text": ("forge_core.data.text:build", "text", TextOptions(), {"pack": False}),
    "tokens": ("forge_core.data.tokens:build", "tokens", TokensOptions(), {}),
    "tokens, holdout": (
        "forge_core.data.tokens:build",
        "tokens",
        TokensOptions(),
        {"holdout": 0.3, "split": "train"},
    ),
    "tokens, best fit": ("forge_core.data.tokens:build", "tokens", TokensOptions(), {"packing": "best_fit"}),
    "jsonl": ("forge_core.data.prepared:build_jsonl", "all.jsonl", JsonlOptions(), {}),
    "chat": ("forge_core.data.prepared:build_chat", "chat.jsonl", ChatOptions(template="plain"), {}),
    "synthetic": ("forge_core.data.synthetic:build", "", SyntheticOptions(n_samples=50), {}),
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_keeps_the_contract(name: str, folder: Path) -> None:
    """Samples are a function of their number, one by one or together, and targets are shifted once."""
    target, path, options, changes = SOURCES[name]
    spec = spec_of(folder / path, folder / "cache", seq_len=48, **changes)
    first, again = (load_object(target)(spec, options) for _ in range(2))
    assert first.fingerprint == again.fingerprint
    assert len(first) == len(again) >= 1
    indices = np.arange(len(first))
    batch = first.batch(indices)
    keys = {"tokens": np.int64, "targets": np.int64, "positions": np.int64, "documents": np.int32}
    keys["valid"] = np.bool_
    assert batch.items()
    assert all(batch[key].dtype == keys[key] for key in batch)
    assert all(value.shape == (len(first), 48) and value.flags.c_contiguous for value in batch.values())
    for index in (0, len(first) // 2, len(first) - 1):
        for key, value in again[index].items():
            assert np.array_equal(value, batch[key][index]), (index, key)
    assert batch["tokens"].min() >= 0
    assert batch["tokens"].max() <= first.max_token < 257
    learnt = batch["targets"][:, :-1] != -100
    assert learnt.any()
    if "valid" in batch:  # padding teaches nothing
        assert (batch["targets"][~batch["valid"]] == -100).all()
    assert np.array_equal(batch["targets"][:, :-1][learnt], batch["tokens"][:, 1:][learnt])
    if "documents" in batch:
        same = np.diff(batch["documents"]) == 0
        assert not (learnt & ~same).any()
        assert np.array_equal(np.diff(batch["positions"])[same], np.ones(same.sum()))
        assert (batch["positions"][:, 1:][~same] == 0).all()
    for wrong in (-1, len(first)):
        with pytest.raises(IndexError):
            first[wrong]
