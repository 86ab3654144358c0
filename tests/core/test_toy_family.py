"""A family of the tests' own, which the core has never heard of and needs no edit for.

It has a table, a layer, a loss term, a metric, a checkpoint extra, a mesh axis, a step function, and a
component of another table.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from pluginkit import Package, installed, package

from forge_core.loop.explain import explain
from forge_core.plugins import Plugins
from forge_core.testing import PluginConformance, TinyRun, run_tiny, tiny_config, tiny_session

TOY = '''
    """The toy family."""

    from __future__ import annotations

    from forge_core import hookimpl
    from forge_core.config import key, table
    from forge_core.contract import Alias, CheckpointExtra, Component, LossTerm, MeshAxis, Metric, Transform

    forge_api = 1


    @table
    class ToyConfig:
        """Layers that mix with a running mean."""

        layers: list[int] = key(factory=lambda: [1], help="Which layers.")
        pull: float = key(0.0, ge=0, help="Weight of the loss term.")
        trick: str = key("plain", component="toy_trick", help="Which trick.")
        repeat: int = key(1, gt=0, help="Updates from each batch.")


    @table
    class SignOptions:
        """Options of signed descent."""

        floor: float = key(0.0, ge=0, help="Smaller gradients do not move a weight.")


    @hookimpl
    def forge_tables():
        return ToyConfig


    @hookimpl
    def forge_components():
        here = __name__
        return [
            Component(
                category="optimizer", name="sign", target=f"{here}:build_sign", options=f"{here}:SignOptions"
            ),
            Component(category="toy_trick", name="plain", target=f"{here}:plain"),
            Component(category="toy_trick", name="negated", target=f"{here}:negated"),
        ]


    def plain(x):
        return x


    def negated(x):
        return -x


    def build_sign(groups, config, options):
        import torch

        class Sign(torch.optim.Optimizer):
            def __init__(self):
                super().__init__(groups, {"lr": config.lr})

            @torch.no_grad()
            def step(self, closure=None):
                for group in self.param_groups:
                    for p in group["params"]:
                        if p.grad is not None:
                            p.sub_(group["lr"] * p.grad.sign() * (p.grad.abs() > options.floor))

        return Sign()


    @hookimpl
    def forge_mesh_axes(config):
        return [MeshAxis(name="toy", size=1, place=35)]


    @hookimpl
    def forge_build_mixer(session, layer):
        if layer.index not in session.config[ToyConfig].layers:
            return None
        import torch
        from torch import nn

        trick = session.component("toy_trick", session.config[ToyConfig].trick)

        class RunningMean(nn.Module):
            def __init__(self, dim):
                super().__init__()
                self.scale = nn.Parameter(torch.empty(dim))

            def forge_reset(self, generator):
                nn.init.ones_(self.scale)

            def forward(self, x, context):
                count = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
                return trick(x.cumsum(1) / count * self.scale)

        return RunningMean(layer.model.dim)


    @hookimpl
    def forge_module_aliases(session):
        return [Alias(name="toy", patterns=("layers.*.attn.scale",))]


    @hookimpl
    def forge_extra_losses(session, model):
        weight = session.config[ToyConfig].pull
        scales = [p for n, p in model.named_parameters() if n.endswith("attn.scale")]

        def pull(model, batch, output):
            return sum((s - 1).square().sum() for s in scales) * len(batch["tokens"])

        if not weight:
            return []
        return [LossTerm(name="toy", weight=weight, needs="module", per="sequences", term=pull)]


    @hookimpl
    def forge_extra_metrics(session, model):
        import torch

        scales = [p for n, p in model.named_parameters() if n.endswith("attn.scale")]
        if not scales:
            return []
        return [Metric(name="toy/scale", op="max", read=lambda: torch.cat(scales).detach().max())]


    class Moves:
        def __init__(self):
            self.count = None


    @hookimpl
    def forge_after_updates(session):
        import torch

        moves = moves_of(session)
        moves.count = torch.zeros((), dtype=torch.int64)
        return [lambda step, ok: moves.count.add_(ok)]


    MOVES = {}


    def moves_of(session):
        return MOVES.setdefault(id(session), Moves())


    @hookimpl
    def forge_checkpoint_extras(session):
        moves = moves_of(session)

        def load(state):
            moves.count.copy_(state["count"])

        def save():
            return {"count": moves.count}

        return [CheckpointExtra(name="moves", version=1, state_dict=save, load_state_dict=load)]


    @hookimpl
    def forge_build_step_fn(session):
        repeat = session.config[ToyConfig].repeat
        if repeat == 1:
            return None
        from forge_core import AccumulateStep

        class Repeated(AccumulateStep):
            """Each batch is trained on several times."""

            def train(self, session, step):
                stream = session.stream
                batches = stream.take(session.grad_accum_steps)
                session.stream = Again(batches)
                try:
                    for _ in range(repeat):
                        result = super().train(session, step)
                finally:
                    session.stream = stream
                return result

        class Again:
            def __init__(self, batches):
                self.batches = batches

            def take(self, count):
                return self.batches

        return Repeated()
'''


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Any:
    one = package(tmp_path_factory.mktemp("toy"), "toy", TOY, distribution="forge-toy")
    with installed([one]):
        yield one


@pytest.mark.usefixtures("toy")
class TestToyConformance(PluginConformance):
    plugin = "toy"
    config: ClassVar = {"toy": {"pull": 0.1, "repeat": 2}}


def run(steps: int = 3, *flags: str, **tables: Any) -> TinyRun:
    plugins = Plugins()
    return run_tiny(tiny_config(*flags, plugins=plugins, **tables), plugins, steps=steps)


def test_its_layer_trains_in_the_core(toy: Package) -> None:
    made = run(5, toy={"layers": [0, 1]})
    scales = [made.weights[f"layers.{i}.attn.scale"] for i in (0, 1)]
    assert not any(scale.equal(torch.ones(16)) for scale in scales)
    assert made.metric("toy/scale")[-1] == pytest.approx(float(torch.cat(scales).max()))
    assert [e.what for e in made.session.plan.entries if e.hook == "forge_build_mixer"] == [
        "layer 0: forge_build_mixer.<locals>.RunningMean",
        "layer 1: forge_build_mixer.<locals>.RunningMean",
    ]


def test_its_loss_term_holds_its_scales_back(toy: Package) -> None:
    free, held = run(5, toy=True), run(5, toy={"pull": 100.0})
    assert held.objectives[-1] > held.losses[-1]
    assert free.objectives == pytest.approx(free.losses, rel=1e-6)

    def distance(made: TinyRun) -> float:
        return float((made.weights["layers.1.attn.scale"] - 1).norm())

    assert distance(held) < distance(free) / 2


def test_a_key_of_its_table_picks_its_own_components(toy: Package) -> None:
    assert run(1, toy=True).losses != run(1, toy={"trick": "negated"}).losses


def test_a_component_of_it_in_a_table_of_the_core_loads_it(toy: Package) -> None:
    """`optimizer.name = "toy/sign"` without `[toy]`: the optimizer is the toy's, the layers the core's."""
    optimizer = {"name": "toy/sign", "lr": 1e-3, "weight_decay": 0.0, "toy/sign": {"floor": 0.0}}
    made = run(1, "--scheduler.name=constant", optimizer=optimizer)
    with tiny_session() as session:
        start = {name: p.detach().clone() for name, p in session.freeze.named.items()}
    steps = torch.cat([(weight - start[name]).abs().flatten() for name, weight in made.weights.items()])
    moved = steps[steps > 0]
    torch.testing.assert_close(moved, torch.full_like(moved, 1e-3), atol=1e-6, rtol=0)
    assert "layers.1.attn.q_proj.weight" in made.weights


def test_its_step_function_repeats_each_batch(toy: Package) -> None:
    once, twice = run(2, toy=True), run(2, toy={"repeat": 2})
    assert twice.session.stream.position == once.session.stream.position
    assert twice.losses[0] < once.losses[0], "the second pass over a batch sees weights that know it"


def test_its_extra_counts_updates(toy: Package) -> None:
    (extra,) = run(4, toy=True).session.checkpoint_extras["toy"]
    assert int(extra.state_dict()["count"]) == 4


def test_its_axis_and_alias_are_there(toy: Package) -> None:
    plugins = Plugins()
    found = explain(tiny_config(plugins=plugins, toy=True, freeze={"modules": ["toy"]}), plugins)
    assert "toy" in [axis["name"] for axis in found["mesh"]]
    alias = next(a for a in found["model"]["aliases"] if a["name"] == "toy")
    assert alias == {"name": "toy", "parameters": 16, "frozen": True}


def test_the_core_knows_nothing_of_it() -> None:
    import forge_core

    root = Path(inspect.getfile(forge_core)).parent
    found = [path for path in root.rglob("*.py") if re.search(r"\btoy\b|\btoy_", path.read_text(), re.I)]
    assert found == []


def test_everything_installed_and_nothing_named_changes_no_bit(toy: Package, tmp_path: Path) -> None:
    """A dozen packages beside the core, some broken: losses and weights are those of the core alone."""
    alone = run_tiny(steps=4)
    packages = [
        package(tmp_path, f"bystander{i}", TOY if i % 2 else "raise RuntimeError('broken')")
        for i in range(12)
    ]
    with installed(packages):
        beside = run(4)
        assert not set(sys.modules) & {one.module for one in packages}, "a package was imported unasked"
    assert beside.losses == alone.losses
    assert beside.grad_norms == alone.grad_norms
    assert all(weight.equal(alone.weights[name]) for name, weight in beside.weights.items())
    assert beside.session.plan.fingerprint == alone.session.plan.fingerprint
