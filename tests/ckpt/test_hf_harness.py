"""lm-evaluation-harness on a model of ours, against its own adapter for transformers and by hand."""

from __future__ import annotations

import builtins
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hfkit import SIZES
from torch import Tensor

from forge_ckpt.hf.exporting import export_hf
from forge_ckpt.hf.harness import evaluate_tasks, harness_model
from forge_ckpt.hf.opening import Opened, open_model
from forge_ckpt.hf.start import tensors_of
from forge_ckpt.hf.tokenizers import write_byte_tokenizer
from forge_ckpt.hf.using import using
from forge_ckpt.hf.weights import InMemory
from forge_core.config.tables import ModelConfig
from forge_core.errors import ForgeError
from forge_core.loop.session import TrainingSession
from forge_core.model import build_decoder, default_parts, initialise
from forge_core.testing import isolated_plugins, tiny_config

TEXTS = ["The number is seven.", "one two three", "x", "A longer text, longer than a window of the model."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model on bytes, sharp enough for answers to differ."""
    out = tmp_path_factory.mktemp("hf")
    config = tiny_config(model={**SIZES, "vocab_size": 257, "max_seq_len": 32, "init_std": 0.4})
    model = config[ModelConfig]
    decoder = build_decoder(model, default_parts(model))
    initialise(decoder, 1, model.init_std, model.n_layers)
    weights = InMemory({name: tensor.detach() for name, tensor in tensors_of(decoder).items()})
    opened = Opened(where="memory", kind="memory", config=config, plugins=isolated_plugins(), weights=weights)
    export_hf(opened, out / "model")
    write_byte_tokenizer(out / "model", 32)
    return out / "model"


@pytest.fixture
def session(folder: Path) -> Iterator[TrainingSession]:
    with using(open_model(folder, ["--train.device=cpu"])) as found:
        yield found


def log_probabilities(session: TrainingSession, ids: list[int]) -> Tensor:
    """(len - 1, V) of the token that follows each."""
    model: Any = session.model
    with torch.no_grad():
        found: Tensor = model.logits(model(torch.tensor([ids[:-1]])))[0].log_softmax(-1)
    return found


def test_without_the_harness_there_is_a_way_out(
    session: TrainingSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("lm_eval") or name == "forge_ckpt.hf.harness_model":
            raise ImportError("No module named 'lm_eval'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ForgeError, match="lm-evaluation-harness") as caught:
        evaluate_tasks(session, ["arc_easy"])
    assert 'pip install "forge-ckpt[lm-eval]"' in caught.value.hint


def request(*args: Any) -> Any:
    from lm_eval.api.instance import Instance

    return Instance(request_type="loglikelihood", doc={}, arguments=args, idx=0)


@pytest.mark.filterwarnings("ignore")
def test_scores_are_sums_of_log_probabilities(session: TrainingSession) -> None:
    pytest.importorskip("lm_eval")
    model = harness_model(session, batch_size=3)
    pairs = [("The number is", " seven"), ("a", "b"), ("", "xy"), ("The number is", " eight, not seven")]
    found = model.loglikelihood([request(*pair) for pair in pairs], disable_tqdm=True)
    for (context, scored), (total, greedy) in zip(pairs, found, strict=True):
        ids = list(context.encode()) or [256]
        table = log_probabilities(session, [*ids, *scored.encode()])[len(ids) - 1 :]
        targets = torch.tensor(list(scored.encode()))
        expected = table.gather(1, targets[:, None]).sum()
        assert total == pytest.approx(float(expected), rel=1e-5)
        assert greedy == bool((table.argmax(-1) == targets).all())


@pytest.mark.filterwarnings("ignore")
def test_a_long_context_is_cut_on_the_left(session: TrainingSession) -> None:
    pytest.importorskip("lm_eval")
    model = harness_model(session)
    long = "abcdefgh" * 10
    [(total, _)] = model.loglikelihood([request(long, "xyz")], disable_tqdm=True)
    ids = [*long.encode(), *b"xyz"][-33:]
    table = log_probabilities(session, ids)
    expected = sum(float(table[-3 + i, b]) for i, b in enumerate(b"xyz"))
    assert total == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ForgeError, match=r"33 tokens to score are more than model\.max_seq_len = 32"):
        model.loglikelihood([request("a", "b" * 33)], disable_tqdm=True)


@pytest.mark.filterwarnings("ignore")
def test_it_agrees_with_the_harness_s_own_adapter(session: TrainingSession, folder: Path) -> None:
    """The exported model in the harness's adapter of transformers: scores, whole texts, generation."""
    pytest.importorskip("lm_eval")
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    theirs = huggingface.HFLM(
        pretrained=loaded, tokenizer=tokenizer, batch_size=2, max_length=32, device="cpu"
    )
    ours = harness_model(session, batch_size=2)
    pairs = [request(text[:3], text[3:30]) for text in TEXTS if len(text) > 4]
    for one, other in zip(ours.loglikelihood(pairs), theirs.loglikelihood(pairs), strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-4)
        assert one[1] == other[1]
    whole = [request(text) for text in TEXTS]
    assert ours.loglikelihood_rolling(whole) == pytest.approx(theirs.loglikelihood_rolling(whole), rel=1e-4)
    options = {"until": ["e"], "max_gen_toks": 8, "do_sample": False}
    asked = [request(text[:5], options) for text in TEXTS]
    assert ours.generate_until(asked) == theirs.generate_until(asked)


@pytest.mark.slow  # importing the harness's tasks and metrics is
@pytest.mark.filterwarnings("ignore")
def test_a_task_runs_whole(session: TrainingSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiple choice from a file here: the accuracy is that of comparing sums by hand."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    questions = [
        {"question": f"Is {n} odd?", "choices": [" yes", " no", " maybe"], "answer": n % 3} for n in range(12)
    ]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(q) + "\n" for q in questions))
    from lm_eval.api.task import ConfigurableTask

    task = ConfigurableTask(
        config={
            "task": "odd",
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(file)}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "choices",
            "doc_to_target": "answer",
            "target_delimiter": "",
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
            "metadata": {"version": 1},
        }
    )
    metrics = evaluate_tasks(session, [task])
    right = 0
    for q in questions:
        sums = []
        for choice in q["choices"]:  # type: ignore[attr-defined]
            ids = list(str(q["question"]).encode())
            table = log_probabilities(session, [*ids, *choice.encode()])[len(ids) - 1 :]
            sums.append(sum(float(table[i, b]) for i, b in enumerate(choice.encode())))
        right += sums.index(max(sums)) == q["answer"]
    assert metrics["odd/acc"] == pytest.approx(right / 12)
    assert not math.isnan(metrics["odd/acc"])
