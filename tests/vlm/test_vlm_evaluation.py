"""What evaluations measure: against numbers worked out by hand, plain forwards, and other layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_vlm_fusions import drawn, each_fusion
from test_vlm_model import session_of
from torch import Tensor
from vlmkit import config_of, tables, third_party, write_samples

from forge_core.errors import ConfigError, DataError, ForgeError
from forge_core.loop.evaluate import evaluate
from forge_core.loop.session import TrainingSession
from forge_core.plugins import Plugins
from forge_core.testing import tiny_config, tiny_session
from forge_core.testing.pool import WorkerPool
from forge_vlm.evaluation.answers import plain, relaxed_match, vqa_accuracy
from forge_vlm.generate import questions_of

ALL = ["exact_match", "vqa_accuracy", "relaxed_accuracy", "caption_loss", "multiple_choice"]
CHOICES = ["a cat", "a dog", "two cats"]


def asked_records(count: int = 21) -> list[dict[str, Any]]:
    """Samples in turn: three choices and an image, several answers and two images, text alone, no label."""
    records: list[dict[str, Any]] = []
    for n in range(count):
        image = f"{n % 6}.png"
        if n % 4 == 0:
            records.append({"image": image, "prompt": f"what{n}? ", "choices": CHOICES, "answer": n % 3})
        elif n % 4 == 1:
            answers = ["yes"] * 2 + ["no"] * 5 + ["maybe"]
            records.append({"images": [image, "0.png"], "prompt": "so? ", "answers": answers})
        elif n % 4 == 2:
            records.append({"prompt": f"{n}", "choices": ["12", "13"], "answer": "13"})
        else:
            records.append({"image": image, "prompt": "x" * 60, "answer": "lost"})
    return records


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("asked"), asked_records())


def evaluated(folder: Path, **more: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Tables of a session that evaluates on all of a folder."""
    vlm = {"answer_tokens": 4, "metrics": ALL, **more.pop("vlm", {})}
    sets = [{"name": "all", "source": "vlm/images", "path": str(folder)}]
    return {"vlm": vlm, "eval": {"sets": sets, "steps": 0, "batch_size": 3}, **more}


def test_agreement_with_people_by_hand() -> None:
    ten = ["red"] * 2 + ["blue"] * 8
    assert vqa_accuracy("red", ten) == pytest.approx((2 * (1 / 3) + 8 * (2 / 3)) / 10)
    assert vqa_accuracy("red", ten) == pytest.approx(0.60)
    assert vqa_accuracy("blue", ten) == 1.0
    assert vqa_accuracy("green", ten) == 0.0
    three = ["red"] * 3 + ["blue"] * 7
    assert vqa_accuracy("red", three) == pytest.approx((3 * (2 / 3) + 7) / 10)
    assert vqa_accuracy("Red.", ["red"]) == 1.0


def test_answers_are_compared_without_what_does_not_matter() -> None:
    assert plain("The  Cat, and two dogs!") == "cat and 2 dogs"
    assert plain("1,200.5") == "1200.5"
    assert plain("don't") == "dont"
    assert plain("an") == ""


def test_relaxed_answers_by_hand() -> None:
    assert relaxed_match("104.9", "100", 0.05)
    assert not relaxed_match("105.1", "100", 0.05)
    assert relaxed_match("96%", "1.0", 0.05)
    assert relaxed_match("Blue ", "blue", 0.05)
    assert not relaxed_match("100", "blue", 0.05)
    assert relaxed_match("0", "0.0", 0.05)


def rows_of(session: TrainingSession) -> list[dict[str, Tensor]]:
    """Every sample of the set as a batch of one."""
    source: Any = session.data.evaluation[0].source  # type: ignore[attr-defined]
    rows = [source[n] for n in range(len(source))]
    return [{name: torch.as_tensor(value)[None] for name, value in row.items()} for row in rows]


def plain_score(session: TrainingSession, row: dict[str, Tensor], choice: str) -> float:
    """Log-probability of a choice and its end, from one forward over the whole without a cache."""
    prompts, _ = questions_of(row)
    start, ids = prompts.lengths[0], [*choice.encode(), session.data.tokenizer.eos_id]
    whole = {name: value.clone() for name, value in row.items()}
    whole["tokens"][0, start : start + len(ids)] = torch.tensor(ids)
    whole["valid"] = (torch.arange(whole["tokens"].shape[1]) < start + len(ids))[None]
    whole["positions"] = torch.arange(whole["tokens"].shape[1])[None]
    whole["image_index"][0, start:] = -1
    whole["documents"] = torch.where(whole["valid"], 0, 1).int()
    whole["targets"] = torch.full_like(whole["targets"], -100)
    whole["targets"][0, start - 1 : start - 1 + len(ids)] = torch.tensor(ids)
    with torch.no_grad():
        return -float(session.forward(session.model, whole).token_loss.double().sum())


@pytest.mark.packages("moe", "vlm")
@each_fusion
def test_all_metrics_equal_plain_loops(folder: Path, more: dict[str, Any]) -> None:
    found_tables = evaluated(folder, **more)
    with session_of(folder, **found_tables) as session:
        drawn(session)
        model: Any = session.model
        calls: list[int] = []
        handle = model.encoder.register_forward_hook(lambda _, args, y: calls.append(len(args[0])))
        found = evaluate(session)
        handle.remove()
        records, loss, tokens, hits = asked_records(), 0.0, 0, []
        rows = rows_of(session)
        for record, row in zip(records, rows, strict=True):
            labels = int((row["targets"] != -100).sum())
            if labels and bool(row["present"].any()):
                with torch.no_grad():
                    loss += float(session.forward(model, row).token_loss.double().sum())
                tokens += labels
            if "choices" in record:
                scores = [plain_score(session, row, choice) for choice in record["choices"]]
                answer = record["answer"]
                right = answer if isinstance(answer, int) else record["choices"].index(answer)
                hits.append(scores.index(max(scores)) == right)
        assert found["eval/caption_loss"] == pytest.approx(loss / tokens, rel=1e-6)
        assert found["eval/caption_loss/perplexity"] == pytest.approx(
            torch.tensor(loss / tokens).exp().item(), rel=1e-5
        )
        assert found["eval/multiple_choice"] == pytest.approx(sum(hits) / len(hits))
        # batches of three: the loss of the set, the caption loss, the answers, and once for all choices
        assert len(calls) == 4 * -(-len(rows) // 3)


@pytest.mark.packages("moe", "vlm")
@each_fusion
def test_scores_of_choices_equal_a_forward_over_each(folder: Path, more: dict[str, Any]) -> None:
    from forge_vlm.evaluation.choices import likelihoods
    from forge_vlm.evaluation.metric import Seen

    with session_of(folder, **evaluated(folder, **more)) as session, torch.no_grad():
        drawn(session)
        session.model.eval()
        rows = rows_of(session)
        chosen = [rows[0], rows[2], rows[8]]
        batch = {name: torch.cat([row[name] for row in chosen]) for name in chosen[0]}
        prompts, right = questions_of(batch)
        options = [CHOICES, ["12", "13"], CHOICES]
        ids = [[(*choice.encode(), 256) for choice in texts] for texts in options]
        seen = Seen(
            session=session, batch=batch, prompts=prompts, right=right, facts=[], answers=[], most_choices=3
        )
        scores, lengths = likelihoods(session.model, seen, ids)
        for number, (row, texts) in enumerate(zip(chosen, options, strict=True)):
            for place, text in enumerate(texts):
                expected = plain_score(session, row, text)
                assert float(scores[number, place]) == pytest.approx(expected, rel=1e-8), (number, text)
                assert int(lengths[number, place]) == len(text) + 1


def test_the_mean_a_token_is_another_score(folder: Path) -> None:
    found = {}
    for score in ("sum", "mean"):
        more = evaluated(folder, vlm={"multiple_choice": {"score": score}, "metrics": ["multiple_choice"]})
        with session_of(folder, **more) as session:
            source: Any = session.data.evaluation[0].source  # type: ignore[attr-defined]
            assert source.most_choices == 3
            assert source.question(0).choices[0] == (*b"a cat", 256)
            assert source.question(0).right == 0
            assert source.question(3) is None
            found[score] = evaluate(session)["eval/multiple_choice"]
    assert all(0 <= value <= 1 for value in found.values())


def test_choices_beyond_the_model_are_left_out_and_counted(tmp_path: Path) -> None:
    """4 visual tokens, 3 of the question, and 26 of a choice with its end, which is not read: 32."""
    fits, beyond = ("c" * 25, "d"), ("c" * 26, "d")
    records = [{"image": "0.png", "prompt": "so?", "choices": each, "answer": 1} for each in (fits, beyond)]
    for count, left_out in ((1, None), (2, 1.0)):
        place = tmp_path / str(count)
        place.mkdir()
        write_samples(place, records[:count])
        few = {"vlm": {"metrics": ["multiple_choice"]}, "train": {"batch_size": 1}}
        more = evaluated(place, **few, model={"max_seq_len": 32})
        with session_of(place, **more) as session:
            assert session.data.evaluation[0].source.most_choices == 2  # type: ignore[attr-defined]
            found = evaluate(session)
        assert found.get("eval/multiple_choice/left_out") == left_out
        assert found["eval/multiple_choice"] in (0.0, 1.0)  # of one question


def on_this_rank(found: dict[str, dict[str, Any]]) -> dict[str, float]:
    """All metrics of an untrained model, as plain data."""
    plugins = third_party()
    with tiny_session(tiny_config(plugins=plugins, **found), plugins) as session:
        drawn(session) if session.control is None else _drawn(session)
        return evaluate(session)


def _drawn(session: TrainingSession) -> None:
    """What `drawn` does, for weights of which this rank has a part."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in session.model.parameters():
            whole = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.2
            if hasattr(parameter, "device_mesh"):
                from torch.distributed.tensor import distribute_tensor

                parts: Any = parameter
                whole = distribute_tensor(whole, parts.device_mesh, parts.placements)
            parameter.add_(whole)


@pytest.mark.parametrize(("layout", "batch"), [({}, 2), ({}, 4), ({"tp": 2}, 3), ({"cp": 2}, 3)])
def test_ranks_measure_what_one_process_does(
    pool2: WorkerPool, folder: Path, layout: dict[str, int], batch: int
) -> None:
    """21 samples: ranks get unequal parts, and one of them a batch of its own that counts for nothing."""
    more = evaluated(folder, vlm={"metrics": [*ALL, "mine/counted"]})
    more["eval"]["batch_size"] = batch
    found = {**tables(folder, **more), "mine": {}}
    expected = on_this_rank(found)
    assert expected["eval/mine/counted"] == 16
    for name in ALL:
        assert f"eval/{name}" in expected
    for each in pool2.run(on_this_rank, {**found, "distributed": layout}):
        assert each == pytest.approx(expected, rel=1e-9)


def test_training_logs_them(folder: Path) -> None:
    from forge_core.testing import run_tiny

    plugins = Plugins()
    more = evaluated(folder)
    more["eval"]["interval"] = 2
    done = run_tiny(config_of(folder, plugins, **more), plugins, steps=2)
    for name in ALL:
        assert len(done.metric(f"eval/{name}")) == 1, name


def test_a_metric_that_asks_needs_answers(folder: Path) -> None:
    with (
        pytest.raises(ForgeError, match=r"vqa_accuracy asks the model, and vlm\.answer_tokens = 0"),
        session_of(folder, vlm={"metrics": ["vqa_accuracy"]}),
    ):
        pass
    with pytest.raises(ConfigError, match="vqa_acuracy"):
        config_of(folder, Plugins(), vlm={"metrics": ["vqa_acuracy"]})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"choices": ["a", "b"], "answer": "c"}, "the answer 'c' is none of the choices a, b"),
        ({"choices": ["a", "b"], "answer": 2}, "the answer is choice 2, and there are 2"),
        ({"choices": ["a"], "answer": "a"}, "one choice is none"),
        (
            {"choices": ["a", "b"], "answer": "a", "messages": [{"role": "assistant", "content": "a"}]},
            "choices are answers to a prompt, and it has messages",
        ),
        ({"answers": "yes"}, "answers is no list of texts"),
    ],
)
def test_questions_that_are_none_are_named(tmp_path: Path, record: dict[str, Any], message: str) -> None:
    write_samples(tmp_path, [{"answer": "x"}] * 4 + [record])
    with pytest.raises(DataError, match=rf"data\.jsonl:5: {message}"), session_of(tmp_path):
        pass


def test_digits_offer_their_answers_to_choose_from(folder: Path) -> None:
    pytest.importorskip("sklearn")
    more = {"data": {"source": "vlm/digits", "holdout": 0.02}, "train": {"seq_len": 40}}
    with session_of(folder, vlm={"metrics": ["multiple_choice"]}, eval={"steps": 0}, **more) as session:
        source: Any = session.data.evaluation[0].source  # type: ignore[attr-defined]
        assert source.most_choices == 10
        asked, again = source.question(0), source.question(1)
        assert asked.choices[3] == (*b"three", 256)
        assert [bytes(choice[:-1]) for choice in again.choices] == [b"no", b"yes"]
        assert (asked.right % 2 == 0) == (again.right == 1)
