"""`forge explain`: what it says is what a run does, and it needs no memory for the weights."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from forge_core.commands.explain import count, grouped, page, size
from forge_core.commands.main import main
from forge_core.contract import Alias, LossTerm, Metric, Transform
from forge_core.loop.explain import explain
from forge_core.model import MLP
from forge_core.testing import isolated_plugins, plugin_object, run_tiny, tiny_config

HUGE = [
    "--model.dim=16384", "--model.n_layers=126", "--model.n_heads=128", "--model.n_kv_heads=8",
    "--model.ffn_hidden_dim=53248", "--model.vocab_size=128256", "--data.source=synthetic",
    "--train.seq_len=8192",
]  # fmt: skip


def term(model: Any, batch: Any, output: Any) -> Any:
    return output.loss_sum * 0


def family() -> Any:
    return plugin_object(
        forge_build_ffn=lambda layer: MLP(layer.model) if layer.index != 1 else None,
        forge_extra_losses=lambda: [LossTerm(name="mine", weight=1.0, term=term)],
        forge_extra_metrics=lambda: [Metric(name="mine/x", op="sum", read=lambda: torch.ones(()))],
        forge_module_aliases=lambda: [Alias(name="mine", patterns=("layers.0.*",), frozen=True)],
        forge_model_transforms=lambda: [Transform(phase="adapt", name="mine", apply=lambda model: model)],
    )


def test_the_plan_is_that_of_the_run() -> None:
    plugins = isolated_plugins({"mine": family()})
    config = tiny_config(plugins=plugins, mine=True, model={"n_layers": 4})
    found = explain(config, plugins)
    run = run_tiny(config, plugins, steps=1)
    written = json.loads((run.folder / "plugins.json").read_text())
    recorder = {"hook": "forge_observers", "plugin": "core", "what": "Recorder"}
    assert found["plan"] == [entry for entry in written["plan"] if entry != recorder]
    assert found["plugins"][1] == {"name": "mine", "version": "0"}


def test_it_is_printed_in_order_with_layers_grouped() -> None:
    plugins = isolated_plugins({"mine": family()})
    found = explain(tiny_config(plugins=plugins, mine=True, model={"n_layers": 4}), plugins)
    lines = [(e["hook"], e["plugin"], e["what"]) for e in grouped(found["plan"])]
    start = lines.index(("forge_build_data", "core", "SamplePipeline"))
    assert lines[start + 1] == ("forge_build_ffn", "mine", "layers 0, 2-3: MLP")
    assert ("forge_module_aliases", "core", "embedding, blocks, head") in lines
    assert ("forge_model_transforms", "mine", "adapt: mine") in lines
    assert ("forge_extra_losses", "mine", "mine") in lines
    assert ("forge_build_optimizers", "core", "main: AdamW") in lines
    text = "\n".join(page(found))
    for word in ("mine 0", "layers 0, 2-3: MLP", "frozen at the start", found["fingerprint"], "main  1: "):
        assert word in text


def test_counts_and_bytes_are_those_of_the_model() -> None:
    plugins = isolated_plugins({"mine": family()})
    config = tiny_config(plugins=plugins, mine=True)
    found, run = explain(config, plugins), run_tiny(config, plugins, steps=1)
    total = sum(weight.numel() for weight in run.weights.values())
    frozen = sum(weight.numel() for name, weight in run.weights.items() if name.startswith("layers.0."))
    assert found["model"]["parameters"] == total
    assert found["model"]["trainable"] == total - frozen
    mine = next(alias for alias in found["model"]["aliases"] if alias["name"] == "mine")
    assert mine == {"name": "mine", "parameters": frozen, "frozen": True}
    memory = found["memory"]
    assert memory["weights"] == 4 * total
    assert memory["gradients"] == 4 * (total - frozen)
    state = run.session.optimizers["main"].optimizer.state.values()
    real = sum(t.nbytes for s in state for t in s.values() if isinstance(t, torch.Tensor))
    assert memory["optimizer"] == pytest.approx(real, rel=0.01)
    assert memory["total"] == sum(memory[name] for name in ("weights", "gradients", "optimizer", "auxiliary"))


def test_auxiliary_models_cost_memory_and_get_none() -> None:
    built: list[torch.device] = []

    def forge_auxiliary_models() -> dict[str, nn.Module]:
        teacher = nn.Linear(1000, 1000, bias=False)
        built.append(teacher.weight.device)
        return {"teacher": teacher}

    plugins = isolated_plugins({"mine": plugin_object(forge_auxiliary_models=forge_auxiliary_models)})
    found = explain(tiny_config(plugins=plugins, mine=True), plugins)
    assert found["memory"]["auxiliary"] == 4_000_000
    assert built == [torch.device("meta")]


def test_the_schedule_is_what_the_run_will_use() -> None:
    flags = ("--scheduler.name=cosine", "--scheduler.warmup_steps=3", "--optimizer.lr=0.01")
    rates = explain(tiny_config(*flags, train={"max_steps": 8}), isolated_plugins())["schedule"]["main"]
    run = run_tiny(tiny_config(*flags), steps=8)
    assert list(rates) == [1, 2, 3, 4, 6, 8]
    assert [rates[step] for step in rates] == pytest.approx([run.metric("train/lr")[s - 1] for s in rates])


def test_the_data_and_the_step_add_up() -> None:
    train = {"batch_size": 2, "grad_accum_steps": 4, "max_steps": 64}
    found = explain(tiny_config(train=train), isolated_plugins())
    assert found["step"]["tokens"] == 2 * 4 * 16
    assert found["data"]["samples"] == 256
    assert found["data"]["epochs"] == 2.0
    assert found["data"]["evaluation"] == ["holdout"]
    assert found["step"]["total_flops"] == 64 * 128 * found["step"]["flops_per_token"]


@pytest.mark.slow
def test_a_model_larger_than_any_memory_is_explained(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "forge_core",
            "explain",
            "quickstart",
            "--json",
            "--eval.sample_tokens=0",
            *HUGE,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["model"]["parameters"] > 4e11
    assert found["memory"]["total"] > 6e12
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2e6, "kilobytes"
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_a_problem_is_reported_as_by_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "quickstart", "--model.dmi=3"]) == 2
    assert "did you mean dim?" in capsys.readouterr().err


def test_numbers_are_short() -> None:
    assert [count(n) for n in (999, 1_234_567, 405_900_000_000)] == ["999", "1.235 M", "405.9 G"]
    assert [size(n) for n in (100, 3 * 2**20, 2**41)] == ["100 B", "3 MiB", "2 TiB"]


def test_hook_explanations() -> None:
    """Plugins add lines under headings of their own, in the order of plugins."""
    plugins = isolated_plugins(
        {
            "b": plugin_object(forge_explanations=lambda session: {"second": ["of", str(session.max_steps)]}),
            "a": plugin_object(forge_explanations={"first": ["line"]}),
            "c": plugin_object(forge_explanations={}),
        }
    )
    found = explain(tiny_config(plugins=plugins, a=True, b=True, c=True, train={"max_steps": 7}), plugins)
    assert [(part["plugin"], part["heading"]) for part in found["more"]] == [("a", "first"), ("b", "second")]
    assert list(page(found))[-3:] == ["first      line", "second     of", "           7"]
