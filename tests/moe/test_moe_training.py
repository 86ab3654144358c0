"""Whole runs with experts in one process: splits, recomputation, evaluation, bias, metrics, compilation."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from forge_core.config import ConfigError
from forge_core.plugins import Plugins
from forge_core.testing import PluginConformance, TinyRun, run_tiny, tiny_config, tiny_session
from forge_moe.ffn import moe_layers

MOE: dict[str, Any] = {"num_experts": 4, "top_k": 2, "bias_rate": 0.01}
FP64 = {"dtype": "fp64"}


class TestConformance(PluginConformance):
    plugin = "moe"
    config: ClassVar[dict[str, Any]] = {"moe": {"num_experts": 4, "shared_experts": 1, "layer_metrics": True}}


def run(*flags: str, moe: dict[str, Any] | None = None, **tables: Any) -> TinyRun:
    plugins = Plugins()
    train = {**FP64, **tables.pop("train", {})}
    config = tiny_config(*flags, plugins=plugins, moe={**MOE, **(moe or {})}, train=train, **tables)
    return run_tiny(config, plugins)


def biases(found: TinyRun) -> list[Tensor]:
    layers = [layer.router.expert_bias for _, layer in moe_layers(found.session.model)]
    return [bias.clone() for bias in layers if bias is not None]


def same(one: TinyRun, other: TinyRun, tolerance: float = 1e-10) -> None:
    """Losses, norms, weights and biases."""
    for name in ("losses", "objectives", "grad_norms"):
        assert getattr(one, name) == pytest.approx(getattr(other, name), rel=tolerance, abs=tolerance), name
    assert one.weights.keys() == other.weights.keys()
    for name, weight in one.weights.items():
        torch.testing.assert_close(weight, other.weights[name], atol=tolerance, rtol=tolerance, msg=name)
    for mine, theirs in zip(biases(one), biases(other), strict=True):
        assert mine.equal(theirs)


@pytest.mark.parametrize("aux_loss", ["sequence", "exact"])
def test_accumulation_is_one_big_batch(aux_loss: str) -> None:
    """Losses that add up: whatever the split, the update is that of the whole batch."""
    moe = {"aux_loss": aux_loss, "aux_loss_weight": 0.3, "router_z_loss_weight": 0.1}
    whole = run(moe=moe, train={"batch_size": 8})
    split = run(moe=moe, train={"batch_size": 2, "grad_accum_steps": 4})
    assert whole.objectives[0] > whole.losses[0] + 0.3
    same(whole, split)


def test_the_loss_of_each_micro_batch_depends_on_the_split() -> None:
    """The check above can fail."""
    moe = {"aux_loss": "micro_batch", "aux_loss_weight": 0.3}
    whole = run(moe=moe, train={"batch_size": 8})
    split = run(moe=moe, train={"batch_size": 2, "grad_accum_steps": 4})
    assert whole.objectives[0] != pytest.approx(split.objectives[0], rel=1e-6)
    global_ = run(moe={**moe, "aux_loss": "global"}, train={"batch_size": 8})
    same(whole, global_)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_changes_nothing(mode: str) -> None:
    moe = {"aux_loss_weight": 0.3, "layer_metrics": True, "capacity_factor": 1.0, "jitter": 0.1}
    keeping = run(moe=moe)
    computing = run(moe=moe, train={"activation_checkpointing": mode})
    same(keeping, computing)
    for name in (
        "moe/aux_loss",
        "moe/router_z_loss",
        "moe/expert_balance",
        "moe/layer0/max_load",
        "moe/dropped_share",
    ):
        assert keeping.metric(name) == pytest.approx(computing.metric(name)), name
        assert len(keeping.metric(name)) == 3


def test_evaluation_changes_nothing() -> None:
    often = run(eval={"interval": 1, "steps": 3})
    never = run(eval={"interval": 0, "at_end": False})
    same(often, never, 0.0)
    assert often.metric("eval/loss")
    assert any(bias.abs().sum() > 0 for bias in biases(often))


def test_the_bias_moves_by_the_counts_of_the_update() -> None:
    """Two layers, two updates of 64 tokens each: the sign of mean - count, times .01."""
    plugins = Plugins()
    config = tiny_config(plugins=plugins, moe=MOE, train={**FP64, "grad_accum_steps": 2, "max_steps": 1})
    seen: list[Tensor] = []
    with tiny_session(config, plugins) as session:
        layers = [layer for _, layer in moe_layers(session.model)]
        session.step_fn.train(session, 1)
        for layer in layers:
            counts = layer.tally[:4].clone()
            assert counts.sum() == 2 * 64  # 2 x 2 rows of 16 tokens, two experts each
            assert layer.tally[4] == 64
            seen.append(counts)
        (after,) = session.after_updates
        after(1, torch.tensor(True))
        for layer, counts in zip(layers, seen, strict=True):
            assert layer.router.expert_bias is not None
            wanted = torch.sign(counts.mean() - counts) * 0.01
            torch.testing.assert_close(layer.router.expert_bias, wanted)
            assert not layer.tally.any()
            before = layer.router.expert_bias.clone()
            layer.tally.add_(torch.arange(7))
            after(2, torch.tensor(False))
            assert layer.router.expert_bias.equal(before)


def test_losses_are_logged_before_and_after_their_weights() -> None:
    found = run(moe={"aux_loss_weight": 0.5, "router_z_loss_weight": 0.25})
    aux, z = found.metric("moe/aux_loss")[0], found.metric("moe/router_z_loss")[0]
    assert aux == pytest.approx(1.0, abs=0.2)
    assert z == pytest.approx(math.log(4) ** 2, abs=0.2)
    assert found.metric("loss/moe_balance")[0] == pytest.approx(0.5 * 2 * aux)
    assert found.metric("loss/moe_router_z")[0] == pytest.approx(0.25 * 2 * z)
    total = found.losses[0] + found.metric("loss/moe_balance")[0] + found.metric("loss/moe_router_z")[0]
    assert found.objectives[0] == pytest.approx(total)
    assert found.metric("moe/router_entropy")[0] == pytest.approx(math.log(4), abs=0.1)
    assert 0 <= found.metric("moe/expert_balance")[0] <= 1
    assert found.metric("moe/dead_experts")[0] == 0


def test_which_layers_have_experts() -> None:
    plugins = Plugins()
    model = {"n_layers": 4}
    for moe, layers in (
        ({"every": 2}, [1, 3]),
        ({"first_dense": 1}, [1, 2, 3]),
        ({"layers": [0, 2]}, [0, 2]),
    ):
        config = tiny_config(plugins=plugins, moe={**MOE, **moe}, model=model)
        with tiny_session(config, plugins) as session:
            names = [name for name, _ in moe_layers(session.model)]
        assert names == [f"layers.{index}.mlp" for index in layers]


def test_experts_start_apart_and_by_role() -> None:
    """Matrices with std .02, those that write to the residual stream with .02 / sqrt(2 layers)."""
    plugins = Plugins()
    model = {"n_layers": 8, "dim": 64, "ffn_hidden_dim": 64}
    with tiny_session(tiny_config(plugins=plugins, moe=MOE, model=model), plugins) as session:
        _, layer = moe_layers(session.model)[0]
    assert layer.experts.w_gate is not None
    for weight, std in (
        (layer.experts.w_gate, 0.02),
        (layer.experts.w_down, 0.005),
        (layer.router.weight, 0.02),
    ):
        assert float(weight.detach().std()) == pytest.approx(std, rel=0.1)
    first = layer.experts.w_up[0]
    assert not any(first.equal(layer.experts.w_up[e]) for e in range(1, 4))


def test_a_frozen_router_keeps_its_bias() -> None:
    found = run(freeze={"modules": ["router", "experts"]})
    assert not any(bias.any() for bias in biases(found))
    start = run(train={"max_steps": 1}, freeze={"modules": ["router", "experts"]})
    for name, weight in found.weights.items():
        if ".router." in name or ".experts." in name:
            assert weight.equal(start.weights[name])


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_runs_are_the_same(recompute: str) -> None:
    moe = {"aux_loss_weight": 0.3, "capacity_factor": 1.5}
    train = {"activation_checkpointing": recompute}
    torch._dynamo.reset()
    compiled = run(moe=moe, train={**train, "compile": True, "compile_backend": "aot_eager"})
    same(run(moe=moe, train=train), compiled)


@pytest.mark.parametrize(
    ("moe", "words"),
    [
        ({"top_k": 9}, "9 is more than num_experts = 4"),
        ({"ep": 3}, "3 does not divide num_experts = 4"),
        ({"router": "nothing"}, "there is no moe_router 'nothing'"),
        ({"router": "expert_choice", "bias_rate": 0.0}, "look at later tokens"),
        ({"capacity_factor": 0.01}, "less than one of a micro-batch's 32 tokens"),
        ({"layers": [7]}, "do not exist"),
        ({"every": 3}, "no layer of model.n_layers = 2 has experts"),
        ({"router": "sigmoid", "sigmoid": {"n_groups": 3}}, "3 does not divide moe.num_experts = 4"),
        (
            {"router": "sigmoid", "sigmoid": {"n_groups": 4, "top_groups": 1}},
            "1 group of experts cannot give moe.top_k = 2",
        ),
        ({"shared_gate": True}, "there are no shared experts"),
    ],
)
def test_what_cannot_work_is_a_problem(moe: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_config(plugins=Plugins(), moe={**MOE, **moe})
    assert words in str(caught.value)


def test_experts_that_choose_are_accepted_where_asked_for() -> None:
    found = run(moe={"router": "expert_choice", "bias_rate": 0.0, "expert_choice": {"look_ahead": True}})
    assert all(found.oks)
    assert found.metric("moe/expert_balance")[0] == 1.0


def test_ep_on_the_wrong_table_is_answered_with_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"moe\.ep"):
        tiny_config(plugins=Plugins(), moe=MOE, distributed={"ep": 2})


def test_operations_count_what_a_token_uses() -> None:
    """Two layers of width 16: router 16 x 4, three experts of 3 x 16 x 32, where an MLP has one."""
    from forge_core.config.tables import ModelConfig
    from forge_moe.flops import flops_beyond_mlp
    from forge_moe.table import MoeConfig

    config = tiny_config(plugins=Plugins(), moe={**MOE, "shared_experts": 1})
    found = flops_beyond_mlp(config[ModelConfig], config[MoeConfig])
    assert found == 6 * 2 * (16 * 4 + 2 * 3 * 16 * 32)


def test_operations_where_experts_choose() -> None:
    """Each of four takes 1.5 / 4 of the tokens, so that a token uses one and a half, whatever top_k is."""
    from forge_core.config.tables import ModelConfig
    from forge_moe.flops import flops_beyond_mlp
    from forge_moe.table import MoeConfig

    choice = {"router": "expert_choice", "bias_rate": 0.0, "expert_choice": {"look_ahead": True}}
    table = {**MOE, **choice, "capacity_factor": 1.5}
    config = tiny_config(plugins=Plugins(), moe=table)
    found = flops_beyond_mlp(config[ModelConfig], config[MoeConfig])
    assert found == 6 * 2 * (16 * 4 + 0.5 * 3 * 16 * 32)
    done = run(moe=table, train={"max_steps": 1}, eval={"at_end": False})
    assert next(layer for _, layer in moe_layers(done.session.model)).experts.active_share == 1.5 / 4


@pytest.mark.parametrize(("frozen", "spared"), [("experts", 2 * 2 * 3 * 16 * 32), ("router", 2 * 16 * 4)])
def test_frozen_experts_spare_what_a_token_uses_of_them(frozen: str, spared: int) -> None:
    """Two of four experts in each of two layers, of 3 x 16 x 32 weights; four operations in place of six."""
    moe = {"top_k": 2, "num_experts": 4, "expert_hidden_dim": 32}
    counted = []
    for modules in ([], [frozen]):
        done = run(moe=moe, freeze={"modules": modules}, train={"max_steps": 1}, eval={"at_end": False})
        counted.append(done.session.metrics.meter.flops_per_token)
    assert counted[0] - counted[1] == 2 * spared


@pytest.mark.parametrize(("mode", "products"), [("none", 6), ("selective", 6), ("full", 9)])
def test_selective_recomputation_keeps_the_products_of_experts(
    mode: str, products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three forward and three for the gradient of what they multiply; whole blocks do the first again."""
    from forge_moe import grouped

    calls = []
    plain = grouped._rows_times
    monkeypatch.setattr(grouped, "_rows_times", lambda *rest: calls.append(1) or plain(*rest))
    moe = {"layers": [1]}
    run(moe=moe, train={"activation_checkpointing": mode, "max_steps": 1}, eval={"at_end": False})
    assert len(calls) == products


def test_operations_of_latent_attention() -> None:
    """Width 16, 2 heads, rotated 8, plain 6, values 10, ranks 4 and 6, 16 tokens, two layers.

    Queries 4 (16 + 28) = 176, the latent 16 (6 + 8) = 224, keys and values 6 * 2 * 16 = 192, output 320: 912
    weights, where ordinary attention has 4 * 16 * 16 = 1024. Scores and sums are 4 wider than 8 on average:
    6 * 2 * 4 * 16 = 768.
    """
    from forge_core.config.tables import ModelConfig
    from forge_moe.flops import flops_beyond_attention
    from forge_moe.table import MoeConfig

    mla = {"kv_rank": 6, "q_rank": 4, "nope_dim": 6, "v_dim": 10}
    config = tiny_config(plugins=Plugins(), moe={**MOE, "mla": mla})
    found = flops_beyond_attention(config[ModelConfig], config[MoeConfig].mla, 16)
    assert found == 2 * (6 * (912 - 1024) + 768)
