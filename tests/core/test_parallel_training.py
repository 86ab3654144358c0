"""Runs on several ranks: losses, norms and final weights are those of one process, to rounding."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forge_core.contract import LossTerm, SplitSpec, Transform
from forge_core.loss import IGNORE, attach_loss
from forge_core.model.generate import generate
from forge_core.testing import isolated_plugins, plugin_object, run_tiny, tiny_config
from forge_core.testing.pool import WorkerPool

STEPS = 6
ROWS = 4
Tables = dict[str, dict[str, Any]]


def run(tables: Tables, steps: int = STEPS) -> dict[str, Any]:
    """What a run leaves behind, as plain data."""
    done = run_tiny(tiny_config(**tables), steps=steps)
    model: Any = done.session.model
    continued = generate(model, [[3, 1, 4, 1, 5], [9, 2]], max_new_tokens=5, temperature=0.0)
    return {
        "losses": done.losses,
        "norms": done.grad_norms,
        "weights": dict(done.weights),
        "eval": done.metric("eval/loss"),
        "continued": continued,
    }


def tables(ranks: int = 1, accumulate: int = 1, **more: dict[str, Any]) -> Tables:
    """A global batch of four rows, of `ranks` data ranks."""
    found: Tables = {
        "model": {"n_kv_heads": 2, "n_layers": 3},
        "train": {
            "dtype": "fp64",
            "batch_size": ROWS // ranks // accumulate,
            "grad_accum_steps": accumulate,
            "max_steps": STEPS,
        },
        "eval": {"interval": 2, "steps": 2, "batch_size": 2, "sample_tokens": 4},
    }
    for name, table in more.items():
        found[name] = {**found.get(name, {}), **table}
    return found


def check(pool: WorkerPool, one: Tables, many: Tables, limit: float = 1e-10) -> None:
    expected = run(one)
    for found in pool.run(run, many, timeout=200):
        for name in ("losses", "norms", "eval"):
            assert found[name] == pytest.approx(expected[name], rel=limit, abs=limit), name
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=limit, atol=limit)
        assert found["continued"] == expected["continued"]


TP = {"tp": 2}
MIXED = {"tp": 2, "sequence_parallel": False}
TIED = {"tie_embeddings": True, "qk_norm": True}


@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "schedule_free_adamw"])
def test_every_optimizer_on_sharded_tensor_ranks(pool4: WorkerPool, name: str) -> None:
    more: Tables = {"optimizer": {"name": name}, "model": TIED}
    check(pool4, tables(**more), tables(2, **more, distributed=MIXED))


@pytest.mark.parametrize("name", ["adamw", "schedule_free_adamw"])
def test_tensor_ranks_alone(pool2: WorkerPool, name: str) -> None:
    more: Tables = {"optimizer": {"name": name}, "model": TIED}
    check(pool2, tables(**more), tables(**more, distributed=MIXED))


def test_accumulation_on_sharded_ranks(pool2: WorkerPool) -> None:
    check(pool2, tables(), tables(2, 2, train={"activation_checkpointing": "selective"}))


FEATURES: dict[str, tuple[int, dict[str, Any], Tables]] = {
    "FSDP2, recomputed, compiled": (
        2,
        {},
        {
            "train": {
                "activation_checkpointing": "full",
                "compile": True,
                "compile_backend": "aot_eager",
            }
        },
    ),
    "FSDP2, every other block by operator": (
        2,
        {"reshard_after_forward": False},
        {"train": {"activation_checkpointing": "selective", "recompute_every": 2}},
    ),
    "TP, dropout, tied, recomputed": (
        1,
        {"tp": 2},
        {"model": {"dropout": 0.2, **TIED}, "train": {"activation_checkpointing": "full"}},
    ),
    "TP without sequence parallel, dropout": (1, MIXED, {"model": {"dropout": 0.2}}),
    "CP, dropout, tied": (1, {"cp": 2}, {"model": {"dropout": 0.2, **TIED}}),
    "TP, compiled, z-loss": (
        1,
        {"tp": 2},
        {"train": {"compile": True, "compile_backend": "aot_eager"}, "loss": {"z_loss_weight": 0.01}},
    ),
    "FSDP2 in host memory": (2, {"cpu_offload": True}, {}),
}


SLOW = ("compiled", "recomputed")
DEAR = (pytest.mark.slow, pytest.mark.timeout(300))


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=DEAR) if any(word in n for word in SLOW) else n for n in FEATURES],
)
def test_features_on_two_ranks(pool2: WorkerPool, name: str) -> None:
    ranks, sizes, more = FEATURES[name]
    plain = {table: dict(values) for table, values in more.items()}
    for key in ("compile", "activation_checkpointing", "recompute_every"):
        plain.get("train", {}).pop(key, None)
    check(pool2, tables(**plain), tables(ranks, **more, distributed=sizes))


def extra_terms(tables: Tables) -> dict[str, Any]:
    """A run with terms that look at hidden states and logits, and a loss attached inside of each block."""

    def hidden_term(model: Any, batch: Any, output: Any) -> torch.Tensor:
        supervised = (batch["targets"] != IGNORE).unsqueeze(-1)
        return (output.hidden * supervised).square().sum()

    def logits_term(model: Any, batch: Any, output: Any) -> torch.Tensor:
        return output.logits.logsumexp(-1).square().sum()

    def attach(model: Any) -> Any:
        for block in model.layers.values():
            block.register_forward_hook(lambda _, args, y: attach_loss(y, y.square().sum() * 0.01, "size"))
        return model

    terms = [
        LossTerm(name="hidden", weight=0.1, term=hidden_term, per="tokens"),
        LossTerm(name="logits", weight=0.1, term=logits_term, needs="logits", per="positions"),
    ]
    plugin = plugin_object(
        forge_extra_losses=lambda: terms,
        forge_model_transforms=lambda: [Transform(phase="modify", name="attach", apply=attach)],
    )
    plugins = isolated_plugins({"extra": plugin})
    done = run_tiny(tiny_config(plugins=plugins, extra=True, **tables), plugins, steps=3)
    return {"losses": done.objectives, "norms": done.grad_norms, "weights": dict(done.weights)}


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"tp": 2, "sequence_parallel": False}, {"cp": 2}, {}])
def test_loss_terms_and_attached_losses(pool2: WorkerPool, sizes: dict[str, Any]) -> None:
    expected = extra_terms(tables())
    many = tables(1 if sizes else 2, train={"activation_checkpointing": "full"}, distributed=sizes)
    for found in pool2.run(extra_terms, many):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-10)
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-10, atol=1e-10)


LOW: dict[str, tuple[int, dict[str, Any]]] = {"FSDP2": (2, {}), "TP": (1, TP), "CP": (1, {"cp": 2})}


@pytest.mark.parametrize("name", LOW)
def test_low_precision_stays_close_and_keeps_its_master_weights(pool2: WorkerPool, name: str) -> None:
    ranks, sizes = LOW[name]
    bf16 = {"dtype": "bf16"}
    expected = run(tables(train=bf16))
    for found in pool2.run(run, tables(ranks, train=bf16, distributed=sizes)):
        # bf16 has 8 bits: 2^-9 of a rounding, some of which add up
        assert found["losses"] == pytest.approx(expected["losses"], rel=2**-9)
        assert found["norms"] == pytest.approx(expected["norms"], rel=2**-6)
        assert {weight.dtype for weight in found["weights"].values()} == {torch.float32}


def documents(folder: Path) -> Path:
    """Short texts, several of which share a row."""
    rng = random.Random(3)
    lines = [{"text": "".join(rng.choices("abcdefgh ", k=rng.randint(1, 30)))} for _ in range(800)]
    path = folder / "short.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return path


PACKED: dict[str, tuple[int, int, dict[str, Any]]] = {
    "FSDP2": (2, 2, {}),
    "TP": (2, 1, TP),
    "CP": (2, 1, {"cp": 2}),
    "HSDP": (4, 4, {"dp_replicate": 2}),
    "FSDP2 x TP": (4, 2, TP),
    "FSDP2 x CP": (4, 2, {"cp": 2}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKED)
def test_twenty_updates_in_single_precision(
    pool2: WorkerPool, pool4: WorkerPool, tmp_path: Path, name: str
) -> None:
    world, ranks, sizes = PACKED[name]
    path = str(documents(tmp_path))
    more: Tables = {
        "data": {"source": "jsonl", "path": path, "holdout": 0.1},
        "optimizer": {"lr": 1e-3},
        "train": {"dtype": "fp32", "max_steps": 20, "seq_len": 32},
        "model": TIED,
    }
    expected = run(tables(**more), 20)
    for found in {2: pool2, 4: pool4}[world].run(run, tables(ranks, **more, distributed=sizes), 20):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-4)
        assert total(found["weights"]) == pytest.approx(total(expected["weights"]), rel=1e-5)


def total(weights: dict[str, torch.Tensor]) -> float:
    """The norm of all weights together."""
    return sum(float(weight.double().square().sum()) for weight in weights.values()) ** 0.5


class Around(nn.Module):
    """A model around the decoder, which says once more how it splits and hands it embeddings."""

    def __init__(self, inner: Any, width: int) -> None:
        super().__init__()
        self.inner = inner
        self.tower = nn.Linear(width, width)

    @property
    def head(self) -> Any:
        return self.inner.head

    @property
    def part(self) -> Any:
        return self.inner.part

    @part.setter
    def part(self, part: Any) -> None:
        pass  # the decoder inside has it

    def forward(self, tokens: torch.Tensor, **rest: Any) -> Any:
        embeds = self.inner.look_up(tokens)
        return self.inner(embeds=embeds + self.tower(embeds), **rest)

    def split(self) -> SplitSpec:
        return SplitSpec(
            entry=("inner.embed", "tower"), blocks="inner.layers", exit=("inner.norm", "inner.head")
        )


def around(tables: Tables) -> dict[str, Any]:
    plugin = plugin_object(forge_build_model=lambda decoder: Around(decoder, decoder.config.dim))
    plugins = isolated_plugins({"around": plugin})
    done = run_tiny(tiny_config(plugins=plugins, around=True, **tables), plugins, steps=3)
    return {"losses": done.losses, "norms": done.grad_norms, "weights": dict(done.weights)}


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"cp": 2}, {}])
def test_a_model_around_the_decoder(pool2: WorkerPool, sizes: dict[str, Any]) -> None:
    plain = tables(eval={"sample_tokens": 0})
    recomputed = {"activation_checkpointing": "full"}
    many = tables(1 if sizes else 2, train=recomputed, distributed=sizes, eval={"sample_tokens": 0})
    expected = around(plain)
    for found in pool2.run(around, many):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-10)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-10)
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, rtol=1e-10, atol=1e-10)
