"""Hooks whose answers run in the loop, and those that save."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from forge_core import AccumulateStep
from forge_core.config.tables import EvalConfig, ModelConfig
from forge_core.contract import CheckpointExtra, LossTerm, Metric, NamedOptimizer, Observer
from forge_core.errors import ForgeError
from forge_core.loop.session import TrainingSession
from forge_core.model.forward import TextForward
from forge_core.testing import isolated_plugins, plugin_object, run_tiny, tiny_config, tiny_session


def mine(**hooks: Any) -> Any:
    return isolated_plugins({"mine": plugin_object(**hooks)})


def run_with(*flags: str, steps: int = 3, folder: Path | None = None, **hooks: Any) -> Any:
    plugins = mine(**hooks)
    return run_tiny(tiny_config(*flags, plugins=plugins, mine=True), plugins, steps=steps, folder=folder)


def test_hook_build_forward() -> None:
    """A forward that doubles the loss doubles the gradient and leaves the reported loss alone."""

    def forge_build_forward(session: TrainingSession) -> Any:
        class Doubled(TextForward):
            def __call__(self, model: nn.Module, batch: dict[str, Any]) -> Any:
                output = super().__call__(model, batch)
                output.loss_sum = 2 * output.loss_sum
                return output

        return Doubled(session)

    run, plain = run_with(steps=1, forge_build_forward=forge_build_forward), run_tiny(steps=1)
    assert run.losses == plain.losses
    assert run.objectives[0] == pytest.approx(2 * plain.objectives[0])
    assert run.grad_norms[0] == pytest.approx(2 * plain.grad_norms[0], rel=1e-5)


class Counting:
    """The same micro-batch again and again; every token predicts itself."""

    def __init__(self) -> None:
        self.train, self.evaluation, self.tokenizer = self, (), None
        self.position, self.open = 0, False

    def take(self, count: int) -> list[dict[str, Tensor]]:
        assert self.open
        self.position += 2 * count
        tokens = torch.arange(32).view(2, 16)
        return [{"tokens": tokens, "targets": tokens} for _ in range(count)]

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.position = state["position"]

    def __enter__(self) -> Counting:
        self.open = True
        return self

    def __exit__(self, *error: object) -> None:
        self.open = False


def test_hook_build_data() -> None:
    """The run trains on the plugin's batches, and leaves its pipeline at the end."""
    data = Counting()
    run = run_with("--train.grad_accum_steps=2", steps=40, forge_build_data=lambda: data)
    assert data.position == 40 * 2 * 2
    assert not data.open
    assert run.losses[-1] < 1.0 < run.losses[0]


def test_hook_build_optimizers() -> None:
    """Plain descent of a plugin: one update is w - lr * schedule(1) * gradient."""

    def forge_build_optimizers(session: TrainingSession) -> dict[str, NamedOptimizer]:
        groups = [{"params": list(session.freeze.ever_trainable().values()), "initial_lr": 0.1}]
        sgd = torch.optim.SGD(groups, lr=0.1)
        return {"main": NamedOptimizer(optimizer=sgd, schedule=lambda step: 0.5 / step)}

    plugins = mine(forge_build_optimizers=forge_build_optimizers)
    config = tiny_config("--train.grad_clip_norm=0", plugins=plugins, mine=True)
    with tiny_session(config, plugins) as session:
        (batch,) = session.stream.take(1)
        output = session.forward(session.model, batch)
        (output.loss_sum / session.forward.count(batch)["tokens"]).backward()
        expected = {n: p.detach() - 0.05 * p.grad for n, p in session.model.named_parameters()}
    run = run_tiny(config, plugins, steps=1)
    assert run.metric("train/lr") == [0.05]
    for name, weight in run.weights.items():
        torch.testing.assert_close(weight, expected[name])


def test_hook_build_step_fn() -> None:
    """A step of two updates sees the data of two, and ends with the weights of two."""

    class Twice(AccumulateStep):
        def train(self, session: TrainingSession, step: int) -> Any:
            super().train(session, step)
            return super().train(session, step)

    flags = ("--scheduler.name=constant",)
    run = run_with(*flags, steps=2, forge_build_step_fn=lambda: Twice())
    plain = run_tiny(tiny_config(*flags), steps=4)
    assert run.losses == plain.losses[1::2]
    assert all(weight.equal(plain.weights[name]) for name, weight in run.weights.items())


@pytest.mark.parametrize("needs", ["hidden", "logits"])
def test_hook_extra_losses(needs: str) -> None:
    """The objective gains weight * sum / count; the term gets what it needs; accumulation changes nothing."""

    def term(model: nn.Module, batch: dict[str, Tensor], output: Any) -> Tensor:
        assert (output.logits is not None) == (needs == "logits")
        return getattr(output, needs).square().sum()  # type: ignore[no-any-return]

    extra = LossTerm(name="mine", weight=0.5, needs=needs, per="sequences", term=term)
    plugins = mine(forge_extra_losses=lambda: [extra])
    config = tiny_config("--train.batch_size=4", plugins=plugins, mine=True)
    with tiny_session(config, plugins) as session, torch.no_grad():
        (batch,) = session.stream.take(1)
        hidden = session.model(batch["tokens"], documents=batch.get("documents"))
        values = hidden if needs == "hidden" else session.model.logits(hidden)
        expected = 0.5 * float(values.square().sum()) / 4
    run = run_tiny(config, plugins, steps=2)
    assert run.metric("loss/mine")[0] == pytest.approx(expected, rel=1e-5)
    assert run.objectives[0] == pytest.approx(run.losses[0] + expected, rel=1e-5)
    split = tiny_config("--train.batch_size=2", "--train.grad_accum_steps=2", plugins=plugins, mine=True)
    assert run_tiny(split, plugins, steps=2).objectives == pytest.approx(run.objectives, rel=1e-5)


def test_hook_before_updates() -> None:
    """Functions run before each update with all it is trained on, and a look at it changes nothing."""
    seen: list[tuple[int, Tensor]] = []
    shapes: list[tuple[int, ...]] = []

    def forge_before_updates(session: TrainingSession, model: nn.Module) -> list[Any]:
        model.register_forward_pre_hook(lambda _, given: shapes.append(tuple(given[0].shape)))

        def before(step: int, batches: Any) -> None:
            seen.append((step, torch.cat([batch["tokens"] for batch in batches])))
            shapes.clear()
            session.step_fn.forward_only(session, batches)
            assert shapes == [(2, 16), (2, 16)]
            assert all(p.grad is None for p in model.parameters())

        return [before]

    flags = ("--train.grad_accum_steps=2", "--model.dropout=0.3")
    run, plain = run_with(*flags, forge_before_updates=forge_before_updates), run_tiny(tiny_config(*flags))
    assert run.losses == plain.losses
    assert all(weight.equal(plain.weights[name]) for name, weight in run.weights.items())
    with tiny_session(tiny_config(*flags)) as session:
        taken = [torch.cat([b["tokens"] for b in session.stream.take(2)]) for _ in range(3)]
    assert [step for step, _ in seen] == [1, 2, 3]
    assert all(one.equal(other) for (_, one), other in zip(seen, taken, strict=True))


@pytest.mark.parametrize("own", [True, False])
def test_forward_only_of_a_step_function_of_others(own: bool) -> None:
    """Its own is called; one that has none runs the model as a whole."""
    calls: list[int] = []

    class Step:
        def __init__(self) -> None:
            inner = AccumulateStep()
            self.train, self.evaluate = inner.train, inner.evaluate
            if own:
                self.forward_only = lambda session, batches: calls.append(len(batches))

    def forge_before_updates(session: TrainingSession, model: nn.Module) -> list[Any]:
        if not own:
            model.register_forward_pre_hook(lambda *_: calls.append(1))
        return [lambda step, batches: session.step_fn.forward_only(session, batches)]

    flags = ("--train.grad_accum_steps=3", "--eval.at_end=false")
    run_with(*flags, steps=1, forge_build_step_fn=lambda: Step(), forge_before_updates=forge_before_updates)
    assert calls == ([3] if own else [1] * 6)


def test_hook_after_updates() -> None:
    """Functions run after each update, with its number and whether it happened, on the device."""
    seen: list[tuple[int, Tensor]] = []
    run_with(forge_after_updates=lambda model: [lambda step, ok: seen.append((step, ok))])
    assert [step for step, _ in seen] == [1, 2, 3]
    assert all(ok.shape == () and ok.dtype is torch.bool and bool(ok) for _, ok in seen)


def test_hook_extra_metrics() -> None:
    """Values are read on log steps only, reduced by their op and finished."""
    reads: list[int] = []

    def forge_extra_metrics(session: TrainingSession) -> list[Metric]:
        def read() -> Tensor:
            reads.append(session.step)
            return torch.tensor(float(session.step))

        pair = (torch.tensor(3.0), torch.tensor(4.0))
        return [
            Metric(name="mine/step", op="sum", read=read),
            Metric(name="mine/share", op="ratio", read=lambda: pair, finish=lambda x: 100 * x),
            Metric(name="mine/nothing", op="max", read=lambda: None),
        ]

    run = run_with("--metrics.log_interval=2", steps=5, forge_extra_metrics=forge_extra_metrics)
    assert reads == [1, 2, 4, 5]
    assert run.metric("mine/step") == [1, 2, 4, 5]
    assert run.metric("mine/share") == [75] * 4
    assert run.metric("mine/nothing") == []


def test_hook_observers() -> None:
    """Events come in the order of a run; those that an observer does not override cost nothing."""
    told: list[str] = []

    class Diary(Observer):
        def train_begin(self, session: TrainingSession) -> None:
            told.append("begin")

        def gradients_ready(self, session: TrainingSession, step: int) -> None:
            told.append(f"gradients {step}")

        def step_end(self, session: TrainingSession, step: int, result: Any) -> None:
            told.append(f"step {step}")

        def eval_end(self, session: TrainingSession, step: int, metrics: Mapping[str, float]) -> None:
            told.append(f"eval {step} {sorted(metrics)[0]}")

        def train_end(self, session: TrainingSession, step: int, reason: str) -> None:
            told.append(f"{reason} {step}")

    run = run_with(steps=2, forge_observers=lambda: [Diary()])
    steps = ["gradients 1", "step 1", "gradients 2", "step 2"]
    assert told == ["begin", *steps, "eval 2 eval/loss", "done 2"]
    assert run.session.events["skipped"] == ()


def test_hook_evaluators() -> None:
    """A task beyond loss runs at each evaluation, in evaluation mode and without gradients."""
    modes: list[tuple[bool, bool]] = []

    def task(session: TrainingSession) -> dict[str, float]:
        modes.append((session.model.training, torch.is_grad_enabled()))
        return {"score": 0.25}

    run = run_with("--eval.interval=2", steps=4, forge_evaluators=lambda: {"mine": task})
    assert run.metric("eval/mine/score") == [0.25, 0.25]
    assert modes == [(False, False)] * 2


def test_hook_build_generator(capsys: pytest.CaptureFixture[str]) -> None:
    """The sample at the end of a run comes from the plugin's generator."""

    class Echo:
        def sample(self, session: Any) -> str:
            config = session.config[EvalConfig]
            [text] = self.generate(session, [config.sample_prompt], max_new_tokens=config.sample_tokens)
            return text

        def generate(
            self, session: Any, prompts: list[str], *, max_new_tokens: int, **sampling: Any
        ) -> list[str]:
            return [f"{prompt} and {max_new_tokens} more" for prompt in prompts]

    flags = ("--eval.sample_tokens=5", "--eval.sample_prompt=once", "--metrics.progress=plain")
    run_with(*flags, steps=1, forge_build_generator=lambda: Echo())
    assert "once and 5 more" in capsys.readouterr().out


def test_a_run_that_is_done_does_not_fail_for_its_sample(capsys: pytest.CaptureFixture[str]) -> None:
    class Silent:
        def sample(self, session: Any) -> str:
            raise ForgeError("the scores are not finite", "train again")

    flags = ("--eval.sample_tokens=5", "--metrics.progress=plain")
    run_with(*flags, steps=1, forge_build_generator=lambda: Silent())
    assert "no sample: the scores are not finite\ndone after 1 step" in capsys.readouterr().out


class Counter:
    """State of a plugin: a tensor, and a number of another kind."""

    def __init__(self) -> None:
        self.seen, self.name = torch.zeros(2), "first"

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen.clone(), "name": self.name}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seen, self.name = state["seen"].clone(), state["name"]


def extra(name: str, state: Counter) -> CheckpointExtra:
    return CheckpointExtra(
        name=name, version=1, state_dict=state.state_dict, load_state_dict=state.load_state_dict
    )


class MemoryKeeper:
    """A checkpointer that keeps weights, data position and extras of all plugins in memory."""

    def __init__(self, every: int, told: list[str]) -> None:
        self.every, self.told = every, told
        self.kept: dict[str, Any] = {}
        self.session: TrainingSession | None = None

    def load(self, session: TrainingSession) -> int:
        self.told.append("load")
        if not self.kept:
            return 0
        with torch.no_grad():
            for name, parameter in session.freeze.named.items():
                parameter.copy_(self.kept["weights"][name])
        session.stream.load_state_dict(self.kept["data"])
        session.optimizers["main"].optimizer.load_state_dict(self.kept["optimizer"])
        for plugin, extras in session.checkpoint_extras.items():
            for one in extras:
                one.load_state_dict(self.kept["extras"][plugin, one.name])
        return int(self.kept["step"])

    def due(self, step: int) -> bool:
        return step > 0 and step % self.every == 0

    def save(self, session: TrainingSession, step: int, kind: str) -> None:
        import copy

        self.told.append(f"save {step} {kind}")
        self.kept = copy.deepcopy(
            {
                "step": step,
                "weights": {n: p.detach() for n, p in session.freeze.named.items()},
                "data": session.stream.state_dict(),
                "optimizer": session.optimizers["main"].optimizer.state_dict(),
                "extras": {
                    (p, e.name): e.state_dict() for p, es in session.checkpoint_extras.items() for e in es
                },
            }
        )

    def staged(self) -> None:
        self.told.append("staged")

    def rollback(self, session: TrainingSession) -> int:
        raise NotImplementedError

    def drain(self) -> None:
        self.told.append("drain")

    def close(self) -> None:
        self.told.append("close")


def counting_plugin(state: Counter) -> Any:
    def forge_after_updates() -> list[Any]:
        return [lambda step, ok: state.seen.add_(ok)]

    return plugin_object(
        forge_after_updates=forge_after_updates, forge_checkpoint_extras=lambda: [extra("counter", state)]
    )


def test_hook_checkpoint_extras() -> None:
    """State is kept by plugin and name: two plugins may use one name, and a resumed run goes on with it."""
    keeper = MemoryKeeper(2, [])
    keeping = plugin_object(forge_build_checkpointer=lambda: keeper)

    def run(left: Counter, right: Counter, steps: int) -> Any:
        named = {"left": counting_plugin(left), "right": counting_plugin(right), "keeper": keeping}
        plugins = isolated_plugins(named)
        return run_tiny(tiny_config(plugins=plugins, **dict.fromkeys(named, True)), plugins, steps=steps)

    left, right = Counter(), Counter()
    right.name = "second"
    run(left, right, 2)
    again = (Counter(), Counter())
    run(*again, 5)
    assert [state.name for state in again] == ["first", "second"]
    assert [state.seen.tolist() for state in again] == [[5, 5], [5, 5]]


def test_hook_build_checkpointer(tmp_path: Path) -> None:
    """Loaded once, asked to be safe before each update, saving when due and at the end; a resume is exact."""
    told: list[str] = []
    keeper = MemoryKeeper(2, told)
    named = ("--run.name=kept", "--scheduler.name=constant")
    run_with(*named, steps=2, folder=tmp_path, forge_build_checkpointer=lambda: keeper)
    assert told == ["load", "staged", "staged", "save 2 final", "drain", "close"]
    resumed = run_with(*named, steps=5, folder=tmp_path, forge_build_checkpointer=lambda: keeper)
    assert told[6:] == [
        "load",
        *["staged"] * 2,
        "save 4 scheduled",
        "staged",
        "save 5 final",
        "drain",
        "close",
    ]
    straight = run_tiny(tiny_config("--scheduler.name=constant"), steps=5)
    assert resumed.losses == straight.losses[2:]
    assert all(weight.equal(straight.weights[name]) for name, weight in resumed.weights.items())
    steps = [
        json.loads(line)["step"] for line in (tmp_path / "kept" / "metrics.jsonl").read_text().splitlines()
    ]
    assert sorted(set(steps)) == [1, 2, 3, 4, 5]


def test_declining_leaves_the_core_in_charge() -> None:
    """A plugin that answers None to every hook of one answer changes nothing."""
    from forge_core.plugins.loading import specifications

    builders = {name: lambda: None for name in specifications() if name.startswith("forge_build_")}
    run, plain = run_with(**builders), run_tiny()
    assert run.losses == plain.losses
    assert all(weight.equal(plain.weights[name]) for name, weight in run.weights.items())
    assert {entry.plugin for entry in run.session.plan.entries} == {"core"}


def test_the_session_gives_hooks_what_is_built_so_far() -> None:
    seen: dict[str, Any] = {}

    def forge_observers(session: TrainingSession) -> list[Observer]:
        seen["dim"] = session.config[ModelConfig].dim
        seen["name"] = session.global_name(session.model.layers["1"].mlp.up_proj, "weight")  # type: ignore[union-attr, index, arg-type]
        return []

    run_with(steps=1, forge_observers=forge_observers)
    assert seen == {"dim": 16, "name": "layers.1.mlp.up_proj.weight"}
