"""A model that sees predicts the next token, and sees none that it is scored on."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_vlm_fusions import EVERY, NAMES, drawn
from test_vlm_model import batch_of, hidden_of, session_of
from vlmkit import VOCABULARY, config_of, mixed_records, third_party, write_samples

from forge_core.loss import IGNORE
from forge_core.testing import run_tiny

CASES = [pytest.param(more, id=name, marks=pytest.mark.slow) for name, more in zip(NAMES, EVERY, strict=True)]
CASES[0] = pytest.param(EVERY[0], id=NAMES[0])
LAST = 100
RULES = [
    pytest.param(more, rule, id=f"{name}-{rule}")
    for name, more in zip(NAMES, EVERY, strict=True)
    for rule in (("none",) if name.endswith("cross_attention") else ("none", "image", "prefix"))
]
"""With blocks of cross attention no visual tokens stand in the sequence."""


@pytest.mark.packages("moe", "vlm")
@pytest.mark.parametrize("more", CASES)
def test_random_tokens_stay_at_the_entropy(more: dict[str, dict[str, Any]]) -> None:
    """Tokens that are drawn evenly from 64, each once: no rule, so the loss stays at ln 64."""
    plugins = third_party()
    tables: dict[str, Any] = {
        **more,
        "data": {"source": "mine/random"},
        "model": {"n_kv_heads": 2, "vocab_size": VOCABULARY},
        "train": {"dtype": "fp32", "batch_size": 8, "seq_len": 20, "max_steps": 300},
        "optimizer": {"lr": 3e-3},
        "vlm": {**more.get("vlm", {}), "max_images": 1},
        "eval": {"at_end": False},
        "mine": {},
    }
    done = run_tiny(config_of("", plugins, **tables), plugins)
    late = sum(done.losses[-LAST:]) / LAST
    assert 0.97 * math.log(VOCABULARY) < late < 1.05 * math.log(VOCABULARY)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("samples"), mixed_records())


@pytest.mark.packages("moe", "vlm")
@pytest.mark.parametrize(("more", "rule"), RULES)
def test_no_logit_sees_the_token_that_it_is_scored_against(
    folder: Path, more: dict[str, dict[str, Any]], rule: str
) -> None:
    name = more["vlm"].get("fusion", "joint")
    vlm = more["vlm"] if rule == "none" else {**more["vlm"], name: {"bidirectional": rule}}
    with session_of(folder, **{**more, "vlm": vlm}) as session:
        drawn(session)
        batch = batch_of(session)
        found = hidden_of(session, batch)
        scored = batch["targets"] != IGNORE
        assert scored.any(1).all()
        for place in range(1, int(batch["valid"].sum(1).max())):
            tokens = batch["tokens"].clone()
            tokens[:, place] = (tokens[:, place] + 1) % 256
            changed = hidden_of(session, batch, tokens=tokens)
            before = scored.clone()
            before[:, place:] = False
            torch.testing.assert_close(changed[before], found[before], rtol=0, atol=1e-12)
