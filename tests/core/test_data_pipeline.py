"""From the tables to batches: text and synthetic sources through the same door."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datakit import Flow, Numbers

from forge_core.config.tables import DataConfig, EvalConfig, MixConfig, ModelConfig, TrainConfig
from forge_core.contract import Component
from forge_core.data.components import COMPONENTS
from forge_core.data.options import SyntheticOptions, TextOptions
from forge_core.data.pipeline import Place, SamplePipeline, SourceChoice, build_data, build_text_data
from forge_core.data.source import SourceSpec
from forge_core.errors import DataError
from forge_core.testing import WorkerPool, isolated_plugins, plugin_object, run_tiny, tiny_config
from forge_core.testing.pool import WorkerError

OPTIONS = {"text": TextOptions(), "synthetic": SyntheticOptions(n_samples=1000)}


def load(target: str) -> Any:
    module, name = target.split(":")
    return getattr(importlib.import_module(module), name)


def make_data(
    source: str,
    *,
    batch_size: int = 4,
    seq_len: int = 16,
    vocab_size: int = 257,
    options: Any = None,
    **keys: Any,
) -> SamplePipeline:
    place = Place(**{k: keys.pop(k) for k in ("data_rank", "data_size", "ahead") if k in keys})
    accumulate = keys.pop("grad_accum_steps", 1)
    build = load(next(c.target for c in COMPONENTS if c.name == source))
    return build_data(
        DataConfig(source=source, **keys),
        TrainConfig(batch_size=batch_size, seq_len=seq_len),
        EvalConfig(),
        vocab_size=vocab_size,
        sources=[
            SourceChoice(name=source, path=keys.get("path"), build=build, options=options or OPTIONS[source])
        ],
        grad_accum_steps=accumulate,
        place=place,
    )


def text_source(path: str) -> SourceChoice:
    build = load("forge_core.data.text:build")
    return SourceChoice(name="text", path=path, build=build, options=TextOptions())


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    for i in range(40):
        (tmp_path / f"{i}.txt").write_text(f"text number {i}\n" * 5)
    return str(tmp_path)


def test_components_load_and_their_options_have_defaults() -> None:
    for component in COMPONENTS:
        assert component.category == "data_source"
        assert callable(load(component.target))
        assert component.options is not None
        assert load(component.options)() is not None


@pytest.mark.parametrize("source", ["text", "synthetic"])
def test_batches_have_the_keys_and_types_of_the_contract(source: str, corpus: str) -> None:
    with make_data(source, path=corpus) as data:
        for batch in (*data.train.take(2), next(iter(data.evaluation[0]))):
            for key in ("tokens", "targets", "positions"):
                assert batch[key].dtype == torch.int64
                assert batch[key].shape == (4, 16)
                assert batch[key].is_contiguous()
            assert batch["sources"].tolist() == [0] * 4
            if source == "text":
                assert batch["documents"].dtype == torch.int32


def test_without_pack_there_are_no_documents(corpus: str) -> None:
    with make_data("text", path=corpus, pack=False) as data:
        (batch,) = data.train.take(1)
        assert "documents" not in batch
        assert (batch["targets"] != -100).all()
        assert torch.equal(batch["positions"], torch.arange(16).expand(4, 16))


def test_training_and_evaluation_share_no_document(corpus: str) -> None:
    with make_data("text", path=corpus, holdout=0.2) as data:

        def lines(source: Any) -> set[str]:
            return set(data.tokenizer.decode(source.tokens).replace("\n", "|").split("|")) - {""}

        train, held = lines(data.train.sources[0]), lines(data.evaluation[0].source)
        assert train
        assert held
        assert not {line for line in held if line in train}


def test_nothing_held_out_is_no_evaluation_set(corpus: str) -> None:
    with make_data("text", path=corpus, holdout=0.0) as data:
        assert data.evaluation == ()


def test_seed_of_the_run_orders_samples_unless_data_has_its_own(corpus: str) -> None:
    def first(seed: int | None, run_seed: int) -> list[Any]:
        data = build_data(
            DataConfig(path=corpus, seed=seed),
            TrainConfig(batch_size=4, seq_len=16, seed=run_seed),
            EvalConfig(),
            vocab_size=257,
            sources=[text_source(corpus)],
        )
        return [batch["tokens"].tolist() for batch in data.train.take(5)]

    assert first(None, 1) == first(1, 2)
    assert first(None, 1) != first(None, 2)


def test_data_smaller_than_an_update_is_refused_before_training(corpus: str) -> None:
    options = SyntheticOptions(n_samples=3)
    with pytest.raises(DataError, match=r"3 samples.*batch of 4 .*1 micro-batch of 4 on 1 data rank"):
        make_data("synthetic", options=options)
    with pytest.raises(DataError, match=r"3 samples.*batch of 4 .*2 micro-batches of 1 on 2 data ranks"):
        make_data("synthetic", options=options, batch_size=1, grad_accum_steps=2, data_size=2)
    with pytest.raises(DataError, match=r"\d+ samples, fewer than the batch of 5000"):
        make_data("text", path=corpus, batch_size=5000)


def test_source_without_samples_is_refused() -> None:
    class Nothing:
        fingerprint = "nothing"

        def __len__(self) -> int:
            return 0

    with pytest.raises(DataError, match=r"source web has 0 samples.*batch of 4"):
        build_data(
            DataConfig(),
            TrainConfig(batch_size=4),
            EvalConfig(),
            vocab_size=257,
            sources=[
                SourceChoice(name="web", path=None, build=lambda spec, options: Nothing())  # type: ignore[arg-type, return-value]
            ],
        )


def test_vocabulary_of_the_model_is_checked(corpus: str) -> None:
    with pytest.raises(DataError, match=r"token id 256 does not fit model\.vocab_size = 256"):
        make_data("text", path=corpus, vocab_size=256)
    with pytest.raises(DataError, match=r"data\.synthetic\.vocab_size = 65 is beyond model\.vocab_size = 64"):
        make_data("synthetic", vocab_size=64, options=SyntheticOptions(vocab_size=65))


def test_synthetic_tokens_are_uniform_reproducible_and_apart() -> None:
    def build(split: str, seed: int) -> Any:
        spec = SourceSpec(
            name="synthetic",
            path=None,
            split=split,  # type: ignore[arg-type]
            seq_len=32,
            tokenizer=None,  # type: ignore[arg-type]
            vocab_size=10,
            pack=True,
            holdout=0.1,
            seed=seed,
        )
        return load("forge_core.data.synthetic:build")(spec, SyntheticOptions(n_samples=10**12))

    source = build("train", 0)
    assert len(source) == 10**12
    assert len(build("holdout", 0)) == 10**11
    batch = source.batch(np.arange(10**12 - 300, 10**12))
    counts = np.bincount(batch["tokens"].ravel(), minlength=10)
    assert len(counts) == 10
    assert ((counts - 960) ** 2 / 960).sum() < 40  # 9 degrees of freedom
    assert np.array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])
    assert np.array_equal(source[10**12 - 1]["targets"], batch["targets"][-1])
    assert np.array_equal(build("train", 0)[7]["tokens"], source[7]["tokens"])
    apart = {build(split, seed)[7]["tokens"].tobytes() for split in ("train", "holdout") for seed in (0, 1)}
    assert len(apart) == 4


def test_leaving_the_pipeline_closes_sources_and_threads() -> None:
    closed = []

    class Files:
        fingerprint = "files"

        def __init__(self, split: str) -> None:
            self.split = split

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"tokens": np.zeros(2, dtype=np.int64), "targets": np.zeros(2, dtype=np.int64)}

        def close(self) -> None:
            closed.append(self.split)

    data = build_data(
        DataConfig(),
        TrainConfig(batch_size=2),
        EvalConfig(),
        vocab_size=257,
        sources=[SourceChoice(name="files", path=None, build=lambda spec, options: Files(spec.split))],
        place=Place(ahead=True),
    )
    data.train.take(1)
    with pytest.raises(KeyError), data:
        raise KeyError
    assert sorted(closed) == ["holdout", "train"]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("forge-data")]


def test_session_gives_tables_component_and_ranks(corpus: str) -> None:
    class Tables(dict[Any, Any]):
        def options(self, path: str, name: str) -> Any:
            assert (path, name) == ("data", "text")
            return TextOptions()

    def component(category: str, name: str) -> Any:
        assert (category, name) == ("data_source", "text")
        return load("forge_core.data.text:build")

    config = Tables()
    config[DataConfig] = DataConfig(path=corpus)
    config[TrainConfig] = TrainConfig(batch_size=2, seq_len=16)
    config[ModelConfig] = ModelConfig(vocab_size=257)
    config[EvalConfig] = EvalConfig(steps=3, batch_size=2)
    seen = []
    for rank in range(2):
        session: Any = SimpleNamespace(
            config=config,
            component=component,
            ranks=SimpleNamespace(data_rank=rank, data_size=2),
            device=torch.device("cpu"),
            grad_accum_steps=2,
            control=None,
        )
        with build_text_data(session) as data:
            seen.append([batch["tokens"] for batch in data.train.take(2)])
            assert data.train.position == 8
            assert len(data.evaluation[0]) == 2
            assert data.tokenizer.vocab_size == 257
    whole = build_data(
        config[DataConfig],
        TrainConfig(batch_size=8, seq_len=16),
        EvalConfig(),
        vocab_size=257,
        sources=[text_source(corpus)],
    )
    together = torch.cat([seen[0][0], seen[1][0], seen[0][1], seen[1][1]])
    assert torch.equal(whole.train.take(1)[0]["tokens"], together)


def numbers(name: str, source: Any, **keys: Any) -> SourceChoice:
    return SourceChoice(name=name, path=None, build=lambda spec, options: source, **keys)


def mixed(
    choices: list[SourceChoice],
    *,
    max_steps: int = 10,
    batch_size: int = 4,
    place: Place | None = None,
    **keys: Any,
) -> SamplePipeline:
    mix = [MixConfig(name=c.name, weight=c.weight, epochs=c.epochs) for c in choices]
    return build_data(
        DataConfig(mix=mix, holdout=0.0, **keys),
        TrainConfig(batch_size=batch_size, seq_len=16, max_steps=max_steps),
        EvalConfig(),
        vocab_size=3000,
        sources=choices,
        place=place,
    )


def shares(pipeline: SamplePipeline, updates: int = 100) -> list[float]:
    drawn = pipeline.train.order.drawn(updates * 4)
    return [count / (updates * 4) for count in drawn.values()]


@pytest.mark.parametrize("names", list(itertools.permutations(("a", "b", "web"))))
def test_empty_source_of_a_mixture_is_named(names: tuple[str, ...]) -> None:
    samples = {"a": 2, "b": 1, "web": 0}
    choices = [numbers(name, Numbers(samples[name]), weight=1.0, epochs=1) for name in names]
    with pytest.raises(DataError, match="source web has 0 samples"):
        mixed(choices, max_steps=1, batch_size=1)
    there = [choice for choice in choices if choice.name != "web"]
    rows = mixed(there, max_steps=3, batch_size=1).train
    assert sorted(rows.take(1)[0]["tokens"][0, 0].item() for _ in range(3)) == [0, 0, 1]


def test_weights_that_are_left_out_are_sizes() -> None:
    by_size = mixed([numbers("a", Numbers(300)), numbers("b", Numbers(100))])
    assert shares(by_size) == pytest.approx([0.75, 0.25], abs=0.01)
    warm = mixed([numbers("a", Numbers(1600)), numbers("b", Numbers(100))], mix_temperature=2.0)
    assert shares(warm) == pytest.approx([0.8, 0.2], abs=0.01)  # 4 to 1, the roots of 16 to 1
    with pytest.raises(
        DataError, match="source flow is a stream of unknown size, which leaves its weight open"
    ):
        mixed([numbers("a", Numbers(300)), numbers("flow", Flow(9))])
    with pytest.raises(DataError, match="leaves its number of epochs open"):
        mixed([numbers("flow", Flow(9), weight=1.0, epochs=2)])


def test_weights_are_of_tokens_or_of_samples() -> None:
    def short() -> Numbers:
        source = Numbers(300)
        source.tokens_per_sample = 4.0  # type: ignore[attr-defined]
        return source

    choices = [numbers("long", Numbers(300), weight=1.0), numbers("short", short(), weight=1.0)]
    # samples of 16 and of 4 tokens: for half of the tokens four of five draws are short
    assert shares(mixed(choices)) == pytest.approx([0.2, 0.8], abs=0.01)
    assert shares(mixed(choices, mix_by="samples")) == pytest.approx([0.5, 0.5], abs=0.01)


def test_data_that_ends_before_the_run_is_refused_and_ends_on_all_ranks_together() -> None:
    def choices() -> list[SourceChoice]:
        return [
            numbers("a", Numbers(10), weight=1.0, epochs=1),
            numbers("b", Numbers(6, first=1000), weight=1.0, epochs=1),
        ]

    with pytest.raises(DataError, match=r"ends after update 4, before train\.max_steps = 10"):
        mixed(choices())
    ranks = [
        mixed(choices(), max_steps=4, batch_size=2, place=Place(data_rank=r, data_size=2)) for r in range(2)
    ]
    seen = []
    for _ in range(4):
        for pipeline in ranks:
            seen += [i for batch in pipeline.train.take(1) for i in batch["tokens"][:, 0].tolist()]
    assert sorted(seen) == [*range(10), *range(1000, 1006)]
    for pipeline in ranks:
        with pytest.raises(DataError, match="the data ends after 16 samples"):
            pipeline.train.take(1)
        assert pipeline.train.position == 16


def test_token_beyond_the_vocabulary_names_its_source() -> None:
    choices = [numbers("a", Numbers(9), weight=1.0), numbers("web", Numbers(9, first=5000), weight=1.0)]
    with pytest.raises(DataError, match=r"source web: token id 500\d does not fit model\.vocab_size = 3000"):
        mixed(choices).train.take(1)


def test_sources_with_and_without_documents_mix() -> None:
    class Rows(Numbers):
        def __init__(self, keys: dict[str, Any]) -> None:
            super().__init__(20)
            self.keys = keys

        batch = None  # type: ignore[assignment]

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"tokens": np.full(3, index), **self.keys}

    cut = {"documents": np.array([0, 0, 1], dtype=np.int32)}
    choices = [numbers("a", Rows(cut), weight=1.0), numbers("b", Rows({}), weight=1.0)]
    (batch,) = mixed(choices).train.take(1)
    assert batch["documents"].dtype == torch.int32
    for source, row in zip(batch["sources"].tolist(), batch["documents"].tolist(), strict=True):
        assert row == [[0, 0, 1], [0, 0, 0]][source]
    strange = [numbers("a", Rows(cut), weight=1.0), numbers("b", Rows({"x": np.zeros(2)}), weight=1.0)]
    with pytest.raises(DataError, match=r"source b gives .*'x': \(2,\).* a sample, source a gives"):
        mixed(strange).train.take(1)


def test_rank_without_data_and_mixture_without_weight_end_the_run_everywhere(pool2: WorkerPool) -> None:
    for case, reason in (
        ("rank 1 has no file", "there is no file or folder"),
        ("empty source", "source b has 0 samples"),
        ("too small", "fewer than the batch of 64"),
        ("no weight", "all weights are 0"),
        ("other words", "source text is not the same on rank 0 and rank 1"),
        ("ends early", "ends after update 5, before train.max_steps = 10"),
    ):
        with pytest.raises(WorkerError) as caught:
            pool2.run(refused_run, case, timeout=20)
        failures = caught.value.failures
        assert set(failures) == {0, 1}, case
        assert all(reason in failure.text for failure in failures.values()), case
        assert all(failure.kind not in ("timeout", "abandoned") for failure in failures.values()), (
            case,
            failures,
        )


def refused_run(case: str) -> None:
    rank = int(os.environ["RANK"])
    synthetic = {"name": "a", "source": "synthetic", "weight": 1.0, "synthetic": {"n_samples": 20}}
    tables: dict[str, Any] = {"distributed": {"dp_shard": 2}}
    if case in ("rank 1 has no file", "other words"):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            if rank == 0 or case == "other words":
                Path("words").write_text(f"some words {rank}\n" * 400)
            run_tiny(tiny_config(**tables, data={"source": "text", "path": "words"}))
    elif case == "too small":
        run_tiny(tiny_config(**tables, data={"mix": [synthetic]}, train={"batch_size": 32}))
    elif case == "ends early":
        once = {**synthetic, "epochs": 1}
        run_tiny(tiny_config(**tables, data={"mix": [once], "holdout": 0.0}, train={"max_steps": 10}))
    elif case == "no weight":
        run_tiny(tiny_config(**tables, data={"mix": [{**synthetic, "weight": 0.0}]}))
    else:
        plugins = isolated_plugins({"kit": plugin_object(forge_components=[EMPTY])})
        mix = [synthetic, {"name": "b", "source": "kit/empty", "weight": 1.0}]
        run_tiny(tiny_config(**tables, data={"mix": mix}, plugins=plugins), plugins)


EMPTY = Component(category="data_source", name="empty", target="test_data_pipeline:empty_source")


def empty_source(spec: Any, options: Any) -> Numbers:
    return Numbers(0)
