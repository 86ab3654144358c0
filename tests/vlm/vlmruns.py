"""Whole runs that see, on one process or in the workers of a pool, and what must be the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from vlmkit import Tables, tables, third_party

from forge_core.plugins import Plugins
from forge_core.testing import run_tiny, tiny_config

STEPS = 5
ROWS = 4
CROSS: dict[str, Any] = {"fusion": "cross_attention", "cross_attention": {"every": 2}}
MOE: dict[str, Any] = {"num_experts": 4, "top_k": 2, "expert_hidden_dim": 24}
FUSIONS: dict[str, Tables] = {
    "joint": {},
    "cross_attention": {"vlm": CROSS},
    "mot": {"vlm": {"fusion": "mot"}},
    "moma": {"vlm": {"fusion": "moma"}, "moe": MOE},
    "gated": {
        "vlm": {"fusion": "gated_cross_attention", "gated_cross_attention": {"layers": [1], "marked": False}}
    },
}

BIASED: dict[str, Any] = {"attention_bias": True, "output_bias": True, "mlp_bias": True, "qk_norm": True}
LATENT: dict[str, Any] = {"kv_rank": 8, "q_rank": 6, "nope_dim": 4, "v_dim": 8}
SLIDING: dict[str, Any] = {"sliding_window": 6, "layer_types": ["sliding", "full"]}
OF_BLOCKS: dict[str, Tables] = {
    "mot, biases": {"vlm": {"fusion": "mot"}, "model": {**BIASED, "n_kv_heads": 2}},
    "mot, latent": {"vlm": {"fusion": "mot"}, "moe": {**MOE, "layers": [1], "mla": LATENT}},
    "mot, windows": {"vlm": {"fusion": "mot"}, "model": {**SLIDING, "n_kv_heads": 2}},
    "moma, latent": {"vlm": {"fusion": "moma"}, "moe": {**MOE, "mla": LATENT}},
    "mot, counted apart": {"vlm": {"fusion": "mot", "mot": {"positions": "modality"}}},
}
"""Fusions around blocks of other kinds, and positions of each modality."""


def run(found: Tables, third: bool = False) -> dict[str, Any]:
    """What a run leaves behind, as plain data."""
    plugins = third_party() if third else Plugins()
    done = run_tiny(tiny_config(plugins=plugins, **found), plugins)
    encoder: Any = done.session.model.encoder
    return {
        "losses": done.losses,
        "norms": done.grad_norms,
        "weights": dict(done.weights),
        "buffers": {name: value.clone() for name, value in encoder.named_buffers()},
        "images": done.metric("data/images"),
        "eval": done.metric("eval/loss"),
        "match": done.metric("eval/exact_match"),
        "captions": done.metric("eval/caption_loss"),
        "modes": encoder.training,
        "graded": sum(p.grad is not None for p in encoder.parameters()),
        "state": sum(p in done.session.optimizers["main"].optimizer.state for p in encoder.parameters()),
    }


def of(folder: Path, data_ranks: int = 1, accumulate: int = 1, **more: dict[str, Any]) -> Tables:
    """A global batch of four rows, of `data_ranks`."""
    batch = {
        "batch_size": ROWS // data_ranks // accumulate,
        "grad_accum_steps": accumulate,
        "max_steps": STEPS,
    }
    found = tables(folder, train={**batch, **more.pop("train", {})}, **more)
    found["eval"] = {"steps": 2, "batch_size": 2, "interval": 3, **more.get("eval", {})}
    found["data"]["holdout"] = 0.3
    found["vlm"]["answer_tokens"] = 3
    found["vlm"]["metrics"] = ["caption_loss"]
    return found


def same(found: dict[str, Any], expected: dict[str, Any], limit: float = 1e-9) -> None:
    """The runs have the same losses, norms, counts, evaluations and weights."""
    for name in ("losses", "norms", "eval", "images", "match", "captions"):
        assert found[name] == pytest.approx(expected[name], rel=limit, abs=limit), name
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=limit, atol=limit, msg=name)


def furthest(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference of a weight."""
    pairs = ((found["weights"][name], weight) for name, weight in expected["weights"].items())
    return max(float((one - other).abs().max()) for one, other in pairs)


class Collectives(TorchDispatchMode):
    """Counts what ranks say to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls again with what it does
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func.__name__.partition(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def collectives_of_a_step(found: Tables) -> dict[str, int]:
    """What the third update of a run adds to the collectives of one of two."""

    def counted(steps: int) -> Counter[str]:
        plugins = Plugins()
        config = tiny_config(plugins=plugins, **found)
        with Collectives() as seen:
            run_tiny(config, plugins, steps=steps)
        return seen.counts

    three, two = counted(3), counted(2)
    return {name: three[name] - two[name] for name in three if three[name] != two[name]}


def trainable(fusion: str) -> Tables:
    """The fusion with an encoder that trains."""
    more = dict({**FUSIONS, **OF_BLOCKS}[fusion])
    more["vlm"] = {**more.get("vlm", {}), "encoder": {"frozen": False}}
    return more
