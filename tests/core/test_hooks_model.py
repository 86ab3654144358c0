"""Hooks that build and change the model, each answered by a small plugin in a real run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forge_core.config.tables import ModelConfig, RunConfig
from forge_core.contract import Alias, LayerInfo, Transform
from forge_core.errors import ConfigError, PluginError
from forge_core.loop.session import TrainingSession
from forge_core.testing import (
    isolated_plugins,
    plugin_object,
    run_tiny,
    tiny_config,
    tiny_model,
    tiny_session,
)

TOKENS = torch.arange(16)[None] % 7


def mine(**hooks: Any) -> Any:
    return isolated_plugins({"mine": plugin_object(**hooks)})


def model_with(**hooks: Any) -> Any:
    plugins = mine(**hooks)
    return tiny_model(tiny_config(plugins=plugins, mine=True), plugins)


def plan_of(run_or_session: Any, hook: str) -> list[tuple[str, str]]:
    session: TrainingSession = getattr(run_or_session, "session", run_or_session)
    return [(entry.plugin, entry.what) for entry in session.plan.entries if entry.hook == hook]


class Rows(nn.Module):
    """The token alone decides what comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.head = nn.Linear(8, 64, bias=False)

    def forward(self, tokens: Tensor, **context: Any) -> Tensor:
        hidden: Tensor = self.embed(tokens)
        return hidden


def test_hook_build_decoder() -> None:
    """A plugin's decoder trains in the place of the core's, from the meta device on."""
    seen: list[torch.device] = []

    def forge_build_decoder(session: TrainingSession) -> nn.Module:
        rows = Rows()
        seen.append(rows.embed.weight.device)
        return rows

    plugins = mine(forge_build_decoder=forge_build_decoder)
    data = {"synthetic": {"n_samples": 2}}
    run = run_tiny(tiny_config("--optimizer.lr=0.1", plugins=plugins, mine=True, data=data), plugins, steps=9)
    assert seen == [torch.device("meta")]
    assert set(run.weights) == {"embed.weight", "head.weight"}
    assert run.losses[-1] < run.losses[0] - 0.5
    assert plan_of(run, "forge_build_decoder") == [("mine", "Rows")]


def test_hook_build_model() -> None:
    """A plugin wraps whatever decoder there is; parameter names show the wrapping."""

    class Wrapped(nn.Module):
        def __init__(self, decoder: nn.Module) -> None:
            super().__init__()
            self.decoder = decoder
            self.head = decoder.head

        def forward(self, tokens: Tensor, **context: Any) -> Tensor:
            return -self.decoder(tokens, **context)  # type: ignore[no-any-return]

    model = model_with(forge_build_model=lambda session, decoder: Wrapped(decoder))
    assert "decoder.embed.weight" in dict(model.named_parameters())
    torch.testing.assert_close(model(TOKENS), -model.decoder(TOKENS))


def test_hook_build_block() -> None:
    """One block replaced by the identity: the model computes what it computes without that layer."""

    class Skip(nn.Module):
        def forward(self, x: Tensor, context: Any) -> Tensor:
            return x

    def forge_build_block(layer: LayerInfo) -> nn.Module | None:
        return Skip() if layer.index == 0 else None

    model = model_with(forge_build_block=forge_build_block)
    whole = tiny_model()
    del whole.layers["0"]
    torch.testing.assert_close(model(TOKENS), whole(TOKENS))


class Shift(nn.Module):
    """Each position sees the one before it."""

    def forward(self, x: Tensor, context: Any) -> Tensor:
        return F.pad(x, (0, 0, 1, 0))[:, :-1]


def test_hook_build_mixer() -> None:
    """Attention replaced in all layers: position t reaches no further than one step a layer."""
    plugins = mine(forge_build_mixer=lambda: Shift())
    with tiny_session(tiny_config(plugins=plugins, mine=True), plugins) as session:
        assert plan_of(session, "forge_build_mixer") == [
            ("mine", "layer 0: Shift"),
            ("mine", "layer 1: Shift"),
        ]
        model = session.model
    changed = TOKENS.clone()
    changed[0, 4] += 1
    different = (model(TOKENS) != model(changed)).any(-1)[0].nonzero().flatten().tolist()
    assert different == [4, 5, 6]


class Squared(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor, context: Any) -> Tensor:
        y: Tensor = self.down(self.up(x).relu().square())
        return y


def test_hook_build_ffn() -> None:
    """A part of every second layer; it gets memory, initial values and gradients like any other."""

    def forge_build_ffn(layer: LayerInfo) -> nn.Module | None:
        return Squared(layer.model.dim, 24) if layer.index % 2 else None

    plugins = mine(forge_build_ffn=forge_build_ffn)
    run = run_tiny(tiny_config(plugins=plugins, mine=True), plugins, steps=3)
    start = tiny_model(tiny_config(plugins=plugins, mine=True), plugins)
    assert run.weights["layers.1.mlp.up.weight"].shape == (24, 16)
    assert not run.weights["layers.1.mlp.up.weight"].equal(start.layers["1"].mlp.up.weight)
    assert 0.01 < start.layers["1"].mlp.up.weight.std() < 0.03
    assert "layers.0.mlp.gate_proj.weight" in run.weights
    assert plan_of(run, "forge_build_ffn") == [("mine", "layer 1: Squared")]


@pytest.mark.parametrize("tied", [False, True])
def test_hook_build_embed(tied: bool) -> None:
    """Another embedding, whose weight a tied head shares."""

    class Doubled(nn.Embedding):
        def forward(self, tokens: Tensor) -> Tensor:
            return 2 * super().forward(tokens)

    plugins = mine(forge_build_embed=lambda layer: Doubled(layer.model.vocab_size, layer.model.dim))
    model: Any = tiny_model(tiny_config(plugins=plugins, mine=True, model={"tie_embeddings": tied}), plugins)
    torch.testing.assert_close(model.embed(TOKENS), 2 * model.embed.weight[TOKENS])
    assert (model.head.weight is model.embed.weight) == tied


def test_hook_blocks_after() -> None:
    """Blocks inserted after a layer run there and are called like blocks."""

    class Scale(nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: Tensor, context: Any) -> Tensor:
            return x * self.factor

    def blocks(layer: LayerInfo) -> list[nn.Module]:
        return [Scale(2.0), Scale(0.5)] if layer.index == 0 else []

    model = model_with(forge_blocks_after=blocks)
    assert list(model.layers) == ["0", "0_after0", "0_after1", "1"]
    torch.testing.assert_close(model(TOKENS), tiny_model()(TOKENS))


def test_hook_attention_masks() -> None:
    """A window of two: the last position cannot be reached from more than one step a layer away."""
    window = ("and", lambda context, q, k: q - k < 2)
    model = model_with(forge_attention_masks=lambda: [window])
    changed = TOKENS.clone()
    changed[0, 4] += 1
    different = (model(TOKENS) != model(changed)).any(-1)[0].nonzero().flatten().tolist()
    assert different == [4, 5, 6]
    ahead = model_with(forge_attention_masks=lambda: [("or", lambda context, q, k: (q < 8) & (k < 8))])
    changed = TOKENS.clone()
    changed[0, 7] += 1
    assert (ahead(TOKENS) != ahead(changed)).any(-1)[0, :8].all(), "a prefix sees all of itself"


def test_hook_auxiliary_models() -> None:
    """A helper beside the model: at hand for hooks that come later, no parameter of the run."""
    plugins = mine(forge_auxiliary_models=lambda: {"teacher": nn.Linear(3, 3).requires_grad_(False)})
    run = run_tiny(tiny_config(plugins=plugins, mine=True), plugins)
    assert list(run.session.auxiliary_models) == ["teacher"]
    assert run.losses == run_tiny().losses
    assert not any("teacher" in name for name in run.weights)
    assert plan_of(run, "forge_auxiliary_models") == [("mine", "teacher: Linear")]


def test_hook_model_transforms() -> None:
    """Phases in their order, the meta device before "materialise" and memory after it."""
    seen: list[tuple[str, bool]] = []

    def noting(phase: str) -> Callable[[nn.Module], nn.Module]:
        def apply(model: nn.Module) -> nn.Module:
            seen.append((phase, next(model.parameters()).is_meta))
            return model

        return apply

    def halve(model: nn.Module) -> nn.Module:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        return model

    def forge_model_transforms() -> list[Transform]:
        phases = ("adapt", "modify", "compile", "shard")
        noted = [Transform(phase=phase, name="note", apply=noting(phase)) for phase in phases]
        return [*noted, Transform(phase="adapt", name="halve", apply=halve)]

    model = model_with(forge_model_transforms=forge_model_transforms)
    assert seen == [("modify", True), ("shard", True), ("compile", True), ("adapt", False)]
    for name, parameter in tiny_model().named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter / 2)


def test_hook_model_transforms_at_a_phase_that_does_not_exist() -> None:
    wrong = Transform(phase="later", name="x", apply=lambda model: model)
    with pytest.raises(PluginError, match="plugin mine: transform 'x' has phase 'later'"):
        model_with(forge_model_transforms=lambda: [wrong])


def test_hook_build_initial_weights() -> None:
    """Asked only where `model.init_from` is set, with the model in memory, before transforms of plugins."""
    seen: list[str | None] = []

    def forge_build_initial_weights(session: TrainingSession) -> Callable[[nn.Module], None]:
        seen.append(session.config[ModelConfig].init_from)

        def fill(model: nn.Module) -> None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(2.0)

        return fill

    def forge_model_transforms() -> list[Transform]:
        def note(model: nn.Module) -> nn.Module:
            seen.append(f"{float(next(model.parameters()).detach().mean())}")
            return model

        return [Transform(phase="adapt", name="note", apply=note)]

    hooks = {
        "forge_build_initial_weights": forge_build_initial_weights,
        "forge_model_transforms": forge_model_transforms,
    }
    plugins = mine(**hooks)
    config = tiny_config(plugins=plugins, mine=True, model={"init_from": "somewhere"})
    tiny_model(config, plugins)
    assert seen == ["somewhere", "2.0"]
    seen.clear()
    plugins = mine(**hooks)
    tiny_model(tiny_config(plugins=plugins, mine=True), plugins)
    assert len(seen) == 1, "nobody is asked"
    with pytest.raises(ConfigError, match=r"model.init_from: no plugin of this run reads weights"):
        tiny_config(model={"init_from": "somewhere"})


def test_hook_module_aliases() -> None:
    """An alias names parameters for `[freeze]`; frozen by default, it does not move until a stage says so."""
    alias = Alias(name="mine", patterns=("layers.*.mlp.*",), frozen=True)
    plugins = mine(forge_module_aliases=lambda: [alias])
    start = dict(tiny_model().named_parameters())
    run = run_tiny(tiny_config(plugins=plugins, mine=True), plugins, steps=2)
    moved = {name for name, weight in run.weights.items() if not weight.equal(start[name])}
    assert moved == {name for name in start if ".mlp." not in name}
    stages = {"stages": [{"start_step": 2, "modules": []}]}
    later = run_tiny(tiny_config(plugins=plugins, mine=True, freeze=stages), plugins, steps=2)
    assert all(not weight.equal(start[name]) for name, weight in later.weights.items())


def test_two_answers_are_an_error_and_a_choice_settles_it() -> None:
    """The chosen plugin comes first; the layers that it declines go to the other one."""

    def ffn(layers: set[int], hidden: int) -> Any:
        def forge_build_ffn(layer: LayerInfo) -> nn.Module | None:
            return Squared(layer.model.dim, hidden) if layer.index in layers else None

        return plugin_object(forge_build_ffn=forge_build_ffn)

    plugins = isolated_plugins({"a": ffn({0, 1}, 4), "b": ffn({1, 2}, 8), "c": plugin_object()})
    tables: dict[str, Any] = {"a": True, "b": True, "c": True, "model": {"n_layers": 4}}
    with pytest.raises(PluginError) as caught:
        tiny_model(tiny_config(plugins=plugins, **tables), plugins)
    assert "a and b both answer forge_build_ffn" in str(caught.value)
    assert '[run.choose] ffn = "a"' in str(caught.value)
    model: Any = tiny_model(tiny_config("--run.choose.ffn=b", plugins=plugins, **tables), plugins)
    found = [
        getattr(block.mlp, "up", block.mlp.up_proj if hasattr(block.mlp, "up_proj") else None)
        for block in model.layers.values()
    ]
    assert [linear.out_features for linear in found] == [4, 8, 8, 32]
    core: Any = tiny_model(tiny_config("--run.choose.ffn=core", plugins=plugins, **tables), plugins)
    assert not any(isinstance(module, Squared) for module in core.modules())
    config = tiny_config("--run.choose.ffn=c", plugins=plugins, **tables)
    assert config[RunConfig].choose == {"ffn": "c"}
    with pytest.raises(PluginError, match=r"run.choose.ffn = 'c', but that plugin does not answer"):
        tiny_model(config, plugins)
