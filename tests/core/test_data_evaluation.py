"""Held-out samples: each once, on any number of ranks, in the same number of batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from datakit import Flow

from forge_core.data.evaluation import HoldoutSet, StreamSet, evaluation_set
from forge_core.errors import ConfigError, DataError
from forge_core.testing import WorkerPool, run_tiny, tiny_config


class Numbers:
    fingerprint = "numbers"

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return {"tokens": np.array([index, index]), "targets": np.array([index, -100])}


def supervised(held: Any) -> list[int]:
    """Samples that count, in the order seen."""
    return [int(row[0]) for batch in held for row in batch["targets"] if row[0] != -100]


@pytest.mark.parametrize("n", [1, 2, 7, 8, 9, 31, 100])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_each_sample_once_and_the_same_number_of_batches(n: int, ranks: int, batch_size: int) -> None:
    sets = [
        HoldoutSet("h", Numbers(n), batch_size=batch_size, data_rank=r, data_size=ranks) for r in range(ranks)
    ]
    assert sorted(i for held in sets for i in supervised(held)) == list(range(n))
    for held in sets:
        batches = list(held)
        assert len(batches) == len(held) == -(-n // (batch_size * ranks))
        assert all(1 <= len(batch["tokens"]) <= batch_size for batch in batches)


def test_one_rank_sees_the_samples_in_order_and_again() -> None:
    held = HoldoutSet("h", Numbers(7), batch_size=3)
    assert [batch["tokens"][:, 0].tolist() for batch in held] == [[0, 1, 2], [3, 4, 5], [6]]
    assert supervised(held) == supervised(held) == list(range(7))


def test_rank_without_samples_takes_part_and_counts_for_nothing() -> None:
    held = HoldoutSet("h", Numbers(1), batch_size=4, data_rank=1, data_size=2)
    (batch,) = held
    assert batch["targets"].tolist() == [[-100, -100]]
    assert batch["tokens"].shape == (1, 2)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_limit_takes_the_same_samples_spread_over_the_set_on_any_ranks(ranks: int) -> None:
    sets = [
        HoldoutSet("h", Numbers(100), batch_size=2, limit=8, data_rank=r, data_size=ranks)
        for r in range(ranks)
    ]
    assert sorted(i for held in sets for i in supervised(held)) == [0, 12, 25, 37, 50, 62, 75, 87]
    for held in sets:
        assert all(batch["numbers"].tolist() == batch["tokens"][:, 0].tolist() for batch in held)


def test_limit_beyond_the_set_repeats_nothing() -> None:
    assert supervised(HoldoutSet("h", Numbers(5), batch_size=2, limit=50)) == list(range(5))


def test_empty_set_and_ids_beyond_the_vocabulary() -> None:
    with pytest.raises(DataError, match="set h: 0 samples, batch 4"):
        HoldoutSet("h", Numbers(0), batch_size=4)
    with pytest.raises(DataError, match="token id 5 does not fit"):
        list(HoldoutSet("h", Numbers(6), batch_size=6, vocab_size=5))


@pytest.mark.parametrize("n", [1, 7, 8, 9])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("limit", [0, 5, 50])
def test_set_of_a_stream_gives_its_first_samples_once(n: int, ranks: int, limit: int) -> None:
    sets = [
        evaluation_set("flow", Flow(n), batch_size=2, limit=limit, data_rank=r, data_size=ranks)
        for r in range(ranks)
    ]
    expected = [int(sample["targets"][0]) for sample in Flow(n).once()][: limit or None]
    found = [list(each) for each in sets]
    assert len({len(batches) for batches in found}) == 1
    seen = [int(row[0]) for each in sets for batch in each for row in batch["targets"] if row[0] != -100]
    assert sorted(seen) == sorted(expected)
    numbered = {
        number: int(row[0])
        for batches in found
        for batch in batches
        for number, row in zip(batch["numbers"].tolist(), batch["targets"], strict=True)
        if row[0] != -100
    }
    assert [numbered[number] for number in sorted(numbered)] == expected
    assert [[b["tokens"].tolist() for b in each] for each in sets] == [
        [b["tokens"].tolist() for b in batches] for batches in found
    ]


def test_empty_stream_is_refused() -> None:
    with pytest.raises(DataError, match="evaluation set flow: the stream has 0 samples"):
        list(StreamSet("flow", Flow(0), batch_size=2))


SETS = [
    {"name": "low", "source": "synthetic", "synthetic": {"n_samples": 21, "vocab_size": 5}},
    {"name": "all", "source": "synthetic", "synthetic": {"n_samples": 9}},
]


def evaluated(batch_size: int, layout: dict[str, int]) -> dict[str, float]:
    """The numbers of an evaluation on two named sets, all of each, after two updates."""
    config = tiny_config(
        train={"batch_size": batch_size, "max_steps": 2, "dtype": "fp64"},
        eval={"sets": SETS, "steps": 0, "batch_size": 2},
        distributed=layout,
    )
    records = run_tiny(config).records
    return {name: value for record in records for name, value in record.items() if name.startswith("eval/")}


def test_named_sets_are_logged_by_name_and_weighed_by_tokens() -> None:
    found = evaluated(4, {})
    assert set(found) == {"eval/loss", "eval/perplexity", "eval/low/loss", "eval/all/loss"}
    mean = (21 * found["eval/low/loss"] + 9 * found["eval/all/loss"]) / 30
    assert found["eval/loss"] == pytest.approx(mean)
    assert found["eval/low/loss"] != pytest.approx(found["eval/all/loss"], rel=1e-4)
    one = tiny_config(eval={"sets": SETS[:1]})
    assert "eval/low/loss" in run_tiny(one, steps=1).records[-1]


def test_named_sets_give_the_same_on_two_ranks(pool2: WorkerPool) -> None:
    alone = evaluated(4, {})
    for found in pool2.run(evaluated, 2, {"dp_replicate": 2, "dp_shard": 1})[:1]:
        assert found == pytest.approx(alone, rel=1e-9)


def test_named_sets_replace_what_would_be_held_out() -> None:
    with pytest.raises(ConfigError, match="two sets are called 'low'"):
        tiny_config(eval={"sets": [SETS[0], SETS[0]]})
    with pytest.raises(ConfigError, match="nothing is held out where"):
        tiny_config(eval={"sets": SETS}, data={"holdout": 0.3})


def test_sample_fits_the_model_unless_its_length_is_stated() -> None:
    def length(*flags: str) -> int | None:
        tokens: int | None = tiny_config(*flags).get("eval").sample_tokens
        return tokens

    assert length() == 0
    assert length("--eval.sample=true", "--train.seq_len=256") == 200
    assert length("--eval.sample=true", "--train.seq_len=32") == 25  # a fifth is left to the prompt: 7
    assert length("--eval.sample_tokens=9") == 9
    assert length("--eval.sample=true", "--eval.sample_tokens=0") == 0
    with pytest.raises(ConfigError, match="leaves no room for a prompt"):
        length("--eval.sample_tokens=200", "--train.seq_len=32")


def test_quickstart_with_shorter_sequences_still_runs() -> None:
    from forge_core.commands.loading import load

    config, _ = load("quickstart", ["--train.seq_len=64"])
    assert config.get("eval").sample_tokens == 51
    config, _ = load("quickstart", [])
    assert config.get("eval").sample_tokens == 200
