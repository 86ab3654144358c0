"""What cannot be divided is refused by `forge check`, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from forge_core.errors import ConfigError
from forge_core.testing import tiny_config, tiny_session

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"model": {"n_heads": 2}, "distributed": {"tp": 4}}, "4 does not divide model.n_heads = 2"),
    "key heads": (
        {"model": {"n_heads": 4, "n_kv_heads": 1, "dim": 32}, "distributed": {"tp": 2}},
        "2 does not divide model.n_kv_heads = 1",
    ),
    "hidden units": (
        {"model": {"ffn_hidden_dim": 33}, "distributed": {"tp": 2}},
        "2 does not divide model.ffn_hidden_dim = 33",
    ),
    "vocabulary": (
        {
            "model": {"vocab_size": 5, "n_heads": 4, "dim": 32},
            "data": {"synthetic": {"vocab_size": 5}},
            "distributed": {"tp": 4},
        },
        "4 ranks cannot each have a row of 5 in the head",
    ),
    "sequence parallel": (
        {"train": {"seq_len": 15}, "distributed": {"tp": 2}},
        "train.seq_len = 15 is not divisible by tp 2",
    ),
    "context": ({"train": {"seq_len": 18}, "distributed": {"cp": 2}}, "18 is not divisible by 4"),
    "offload": ({"distributed": {"cpu_offload": True}}, "there is one data rank"),
    "every n-th": ({"train": {"recompute_every": 2}}, "without activation checkpointing"),
    "half precision": (
        {"train": {"dtype": "fp16"}, "guard": {"action": "stop"}},
        "gradients overflow now and then",
    ),
    "float8 on tensor ranks": ({"train": {"float8": True}, "distributed": {"tp": 2}}, "float8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_divided_is_refused(name: str) -> None:
    tables, words = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        tiny_config(**tables)
    assert words in str(caught.value)


def test_uneven_vocabulary_and_length_are_fine_where_they_can_be() -> None:
    tiny_config(
        model={"vocab_size": 63},
        data={"synthetic": {"vocab_size": 63}},
        train={"seq_len": 15},
        distributed={"tp": 2, "sequence_parallel": False},
    )


def test_float8_is_refused_by_a_device_that_lacks_it() -> None:
    words = r"compute capability 8\.9 or more; this is a device of type cpu"
    with pytest.raises(ConfigError, match=words), tiny_session(tiny_config(train={"float8": True})):
        pass
