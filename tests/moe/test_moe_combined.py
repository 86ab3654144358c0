"""Experts with everything else that a run can have, beside a plain loop over tokens, formulas and updates."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from moekit import plain
from torch import Tensor, nn

from forge_core.config.tables import TrainConfig
from forge_core.contract import Component, LayerContext
from forge_core.optim import optimizer_mode
from forge_core.optim.muon import orthogonalise
from forge_core.plugins import Candidate, Plugins
from forge_core.testing import plugin_object, run_tiny, tiny_config, tiny_session
from forge_moe.ffn import MoeFFN, moe_layers

STEPS = 5
BALANCE, Z, RATE = 0.2, 0.1, 0.01
MOE = {
    "num_experts": 4,
    "top_k": 2,
    "shared_experts": 1,
    "bias_rate": RATE,
    "aux_loss_weight": BALANCE,
    "router_z_loss_weight": Z,
}


class Reference:
    """What a layer of experts computes and counts, token by token; takes the place of its forward."""

    def __init__(self, layer: MoeFFN) -> None:
        self.layer = layer
        self.counts = torch.zeros(4, dtype=torch.float64)
        self.losses: list[tuple[Tensor, Tensor]] = []
        layer.forward = self.run  # type: ignore[method-assign]

    def run(self, x: Tensor, context: LayerContext) -> Tensor:
        router, rows, length = self.layer.router, x.shape[0], x.shape[1]
        assert router.expert_bias is not None
        valid = torch.ones(rows, length, dtype=torch.bool) if context.valid is None else context.valid
        logits = x @ router.weight.T
        scores = logits.exp() / logits.exp().sum(-1, keepdim=True)
        chosen = (scores.detach() + router.expert_bias).topk(2).indices
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        hit = F.one_hot(chosen, 4).sum(2) * valid[..., None]
        if self.layer.training:
            self.counts += hit.sum((0, 1))
        tokens = valid.sum(1, keepdim=True).clamp(min=1)
        share = 4 * hit.sum(1) / (2 * tokens)
        balance = (share * (scores * valid[..., None]).sum(1) / tokens).sum()
        z = (logits.logsumexp(-1).square() * valid).sum()
        self.losses.append((balance, z))
        chosen = chosen.masked_fill(~valid[..., None], 4).view(-1, 2)
        assert self.layer.shared is not None
        return plain(self.layer, x, chosen, weights.view(-1, 2)) + self.layer.shared(x, context)


def plain_losses(
    plugins: Plugins, config: Any
) -> tuple[list[float], list[float], dict[str, Tensor], list[Tensor]]:
    """Loss and norm of each update, and weights and biases at the end."""
    losses, norms = [], []
    with tiny_session(config, plugins) as session:
        model: Any = session.model
        layers = [Reference(layer) for _, layer in moe_layers(model)]
        named = session.optimizers["main"]
        optimizer_mode(named.optimizer, "train")
        for step in range(1, STEPS + 1):
            session.step = step - 1
            session.freeze.apply(step)
            session.freeze.set_modes(model)
            loss = update(session, model, layers, named, step, norms)
            losses.append(loss)
        weights = {name: p.detach().clone() for name, p in session.freeze.named.items()}
        return (
            losses,
            norms,
            weights,
            [b for layer in layers if (b := layer.layer.router.expert_bias) is not None],
        )


def update(
    session: Any, model: Any, layers: list[Reference], named: Any, step: int, norms: list[float]
) -> float:
    batches = session.stream.take(session.grad_accum_steps)
    tokens = sum(int((b["targets"] != -100).sum()) for b in batches)
    positions = sum(int(b["valid"].sum()) if "valid" in b else b["targets"].numel() for b in batches)
    sequences = sum(len(b["targets"]) for b in batches)
    total = 0.0
    for batch in batches:
        for layer in layers:
            layer.losses.clear()
        inputs = {name: batch.get(name) for name in ("positions", "documents")}
        hidden = model(batch["tokens"], **inputs, valid=batch.get("valid"), apart="valid" in batch)
        logits = hidden @ model.head.weight.T
        main = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="sum") / tokens
        loss = main
        for layer in layers:
            for balance, z in layer.losses:
                loss = loss + BALANCE * balance / sequences + Z * z / positions
        loss.backward()
        total += float(main.detach())
    parameters = [p for group in named.optimizer.param_groups for p in group["params"] if p.grad is not None]
    norms.append(float(nn.utils.clip_grad_norm_(parameters, session.config[TrainConfig].grad_clip_norm)))
    for group in named.optimizer.param_groups:
        group["lr"] = group["initial_lr"] * named.schedule(step)
    named.optimizer.step()
    named.optimizer.zero_grad(set_to_none=True)
    for layer in layers:
        bias = layer.layer.router.expert_bias
        if bias is not None and layer.layer.training:
            bias += RATE * torch.sign(layer.counts.mean() - layer.counts)
        layer.counts.zero_()
    return total


def descent(groups: Any, config: Any, options: Any) -> torch.optim.Optimizer:
    """An optimizer of somebody else, which knows nothing of Forge."""
    return torch.optim.SGD(groups, lr=config.lr, momentum=0.9)


def installed() -> Plugins:
    """All plugins, and one with that optimizer."""
    here = ModuleType("descent_of_tests")
    here.descent = descent  # type: ignore[attr-defined]
    sys.modules[here.__name__] = here
    component = Component(category="optimizer", name="descent", target=f"{here.__name__}:descent")
    mine = plugin_object(forge_components=lambda: [component])
    others = Plugins().installed
    return Plugins(installed=[*others, Candidate(name="mine", source="test", version="0", loaded=mine)])


def compare(*, moe: dict[str, Any] | None = None, **tables: Any) -> None:
    plugins = installed()
    train = {"dtype": "fp64", "max_steps": STEPS, "batch_size": 2, **tables.pop("train", {})}
    config = tiny_config(plugins=plugins, moe={**MOE, **(moe or {})}, train=train, **tables)
    found = run_tiny(config, plugins)
    eager = {**train, "compile": False, "activation_checkpointing": "none"}
    plugins = installed()
    config = tiny_config(plugins=plugins, moe={**MOE, **(moe or {})}, train=eager, **tables)
    losses, norms, weights, biases = plain_losses(plugins, config)
    assert found.losses == pytest.approx(losses, rel=1e-9)
    assert found.grad_norms == pytest.approx(norms, rel=1e-8)
    for name, weight in weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=1e-8, atol=1e-9, msg=name)
    for (_, layer), bias in zip(moe_layers(found.session.model), biases, strict=True):
        assert layer.router.expert_bias is not None
        torch.testing.assert_close(layer.router.expert_bias, bias, rtol=0, atol=1e-12)
    assert any(bias.any() for bias in biases)


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "schedule_free_adamw", "mine/descent"])
def test_every_optimizer(name: str) -> None:
    compare(optimizer={"name": name, "lr": 1e-2})


def test_muon_takes_each_expert_by_itself() -> None:
    """lr times the orthogonal part of each matrix: the first update keeps nothing of others."""
    plugins = Plugins()
    config = tiny_config(
        plugins=plugins,
        moe=MOE,
        train={"dtype": "fp64"},
        optimizer={"name": "muon", "lr": 1e-2, "weight_decay": 0.0},
    )
    with tiny_session(config, plugins) as session:
        (batch,) = session.stream.take(1)
        session.forward(session.model, batch).loss_sum.backward()
        _, layer = moe_layers(session.model)[0]
        parameter = layer.experts.w_up
        before, gradient = parameter.detach().clone(), parameter.grad
        assert gradient is not None
        optimizer = session.optimizers["main"].optimizer
        (group,) = [g for g in optimizer.param_groups if any(p is parameter for p in g["params"])]
        optimizer.step()
    for expert, moved in enumerate((before - parameter.detach()).unbind()):
        whole = orthogonalise(gradient[expert], group["ns_steps"], torch.float64)
        torch.testing.assert_close(moved, group["lr"] * 2**0.5 * whole)  # 32 rows of 16


def test_accumulation_and_recomputation() -> None:
    compare(train={"grad_accum_steps": 2, "activation_checkpointing": "full"})


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled() -> None:
    torch._dynamo.reset()
    compare(train={"compile": True, "compile_backend": "aot_eager"})


def documents(folder: Path) -> str:
    """Texts of many lengths, a line of JSON each."""
    path = folder / "texts.jsonl"
    texts = [chr(97 + i % 26) * (1 + 5 * i % 13) for i in range(200)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.mark.parametrize("packing", ["best_fit", "concatenate"])
def test_packed_documents_with_padding(packing: str, tmp_path: Path) -> None:
    data = {
        "source": "jsonl",
        "path": documents(tmp_path),
        "cache_dir": str(tmp_path / "cache"),
        "pack": True,
        "packing": packing,
        "holdout": 0.0,
    }
    compare(data=data, eval={"interval": 0, "at_end": False, "steps": 1})


def test_a_mixture() -> None:
    mix = [
        {"name": "one", "source": "synthetic", "weight": 1.0},
        {"name": "two", "source": "synthetic", "weight": 3.0, "synthetic": {"n_samples": 64}},
    ]
    compare(data={"mix": mix}, eval={"interval": 0, "at_end": False})


def test_a_schedule_of_freezing() -> None:
    stages = [{"start_step": 3, "modules": ["shared_experts"]}, {"start_step": 5, "modules": []}]
    compare(freeze={"modules": ["experts", "embedding"], "stages": stages})
