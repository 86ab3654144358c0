"""What a run goes on from, what is reported, and what is refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ckptkit import assert_same_run, killed, moments, names, plugins_for, run
from torch import Tensor

from forge_ckpt import open_checkpoint
from forge_ckpt.changes import changes
from forge_ckpt.errors import CheckpointError, RefusedError, RequestError
from forge_core.contract import CheckpointExtra
from forge_core.contract.runtime import Observer
from forge_core.errors import DataError

CONSTANT = {"scheduler": {"name": "constant"}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four updates, saved after each."""
    folder = tmp_path_factory.mktemp("saved")
    run(folder, steps=4, **CONSTANT)
    return folder / "a"


def elsewhere(place: object, **table: Any) -> dict[str, Any]:
    return {"interval": 0, "resume": str(place), **table}


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return run(tmp_path_factory.mktemp("straight"), steps=6, **CONSTANT)


@pytest.mark.parametrize(
    ("place", "step"), [("checkpoints/step_00000002", 2), (".", 4), ("checkpoints/latest", 4)]
)
def test_from_a_path(place: str, step: int, saved: Path, straight: Any, tmp_path: Path) -> None:
    resumed = run(tmp_path, steps=6, checkpoint=elsewhere(saved / place), **CONSTANT)
    assert resumed.losses == straight.losses[step:]
    assert_same_run(straight, resumed)


def test_what_it_goes_on_from_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, steps=1, **CONSTANT)
    capsys.readouterr()
    run(tmp_path, steps=2, **CONSTANT)
    told = capsys.readouterr()
    place = tmp_path / "a/checkpoints/step_00000001"
    assert f"info: going on after step 1 from {place}" in told.out + told.err
    assert logging.getLogger("forge").level == logging.NOTSET


@pytest.mark.parametrize("place", ["nowhere", "checkpoints/step_00000099"])
def test_a_path_to_nothing_is_an_error(place: str, saved: Path, tmp_path: Path) -> None:
    for key, table in (
        ("resume", elsewhere(saved / place)),
        ("start_from", {"start_from": str(saved / place)}),
    ):
        with pytest.raises(RequestError, match=rf"checkpoint\.{key}: there (is|are) no checkpoint"):
            run(tmp_path, checkpoint=table, **CONSTANT)


def test_start_from_counts_only_for_the_first_start(saved: Path, straight: Any, tmp_path: Path) -> None:
    table = {"interval": 1, "start_from": str(saved / "checkpoints/step_00000002")}
    killed(tmp_path, 5, checkpoint=table, **CONSTANT)  # saved after 3 and 4
    assert names(tmp_path) == ["latest", "step_00000003", "step_00000004"]
    resumed = run(tmp_path, steps=6, checkpoint=table, **CONSTANT)
    assert resumed.losses == straight.losses[4:]


def test_fresh_start_and_unnamed_runs(saved: Path, tmp_path: Path) -> None:
    assert len(run(tmp_path, steps=2, checkpoint={"resume": False}).losses) == 2
    assert len(run(tmp_path, steps=2, checkpoint={"resume": False}).losses) == 2


def initial(tmp_path: Path, **tables: Any) -> dict[str, Tensor]:
    first = run(tmp_path / "initial", steps=1, checkpoint={"initial": True}, **{**CONSTANT, **tables})
    whole = open_checkpoint(first.folder / "checkpoints/step_00000000")
    return {name: whole.tensor(f"model/{name}").clone() for name in whole.index.names("model/")}


class Begin(Observer):
    """Keeps weights and the size of the optimizer's state as the run begins."""

    def train_begin(self, session: Any) -> None:
        self.weights = {name: p.detach().clone() for name, p in session.freeze.named.items()}
        states = session.optimizers["main"].optimizer.state.values()
        self.moved = any(bool(state["exp_avg"].any()) for state in states)
        self.step = session.step


def begin(tmp_path: Path, table: Mapping[str, Any], **tables: Any) -> Begin:
    seen = Begin()
    run(
        tmp_path, plugins=plugins_for(hooks={"observers": [seen]}), checkpoint=table, **{**CONSTANT, **tables}
    )
    return seen


def test_weights_only(saved: Path, tmp_path: Path) -> None:
    seen = begin(tmp_path, elsewhere(saved, weights_only=True))
    assert seen.step == 0
    assert not seen.moved
    whole = open_checkpoint(saved)
    assert all(torch.equal(whole.tensor(f"model/{n}"), w) for n, w in seen.weights.items())


def test_without_the_optimizer(saved: Path, tmp_path: Path) -> None:
    seen = begin(tmp_path, elsewhere(saved, optimizer=False))
    assert (seen.step, seen.moved) == (4, False)


def test_some_parameters(saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="forge"):
        seen = begin(tmp_path, elsewhere(saved, include=["layers.*"], exclude=["layers.1.*"]))
    at_first, whole = initial(tmp_path), open_checkpoint(saved)
    for name, weight in seen.weights.items():
        taken = name.startswith("layers.0.")
        assert torch.equal(weight, whole.tensor(f"model/{name}") if taken else at_first[name]), name
    count = sum(name.startswith("layers.0.") for name in seen.weights)
    assert f"{count} of {len(seen.weights)} tensors loaded" in caplog.text


def test_a_deeper_model(saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    deeper = {"model": {"n_layers": 3}}
    with pytest.raises(RefusedError, match=r"layers\.2"):
        begin(tmp_path, elsewhere(saved), **deeper)
    with caplog.at_level(logging.WARNING, logger="forge"):
        seen = begin(tmp_path, elsewhere(saved, partial=True), **deeper)
    whole = open_checkpoint(saved)
    for name, weight in seen.weights.items():
        if not name.startswith("layers.2."):
            assert torch.equal(weight, whole.tensor(f"model/{name}"))
    assert "layers.2" in caplog.text
    shallower = {"model": {"n_layers": 1}}
    with pytest.raises(RefusedError, match=r"which the model lacks"):
        begin(tmp_path, elsewhere(saved), **shallower)
    begin(tmp_path, elsewhere(saved, partial=True), **shallower)


def test_another_shape_is_refused_and_names_it(saved: Path, tmp_path: Path) -> None:
    for table in (elsewhere(saved), elsewhere(saved, partial=True)):
        with pytest.raises(RefusedError, match=r"layers.0.*is \(.*\) here and \(.*\).* in ") as caught:
            begin(tmp_path, table, model={"ffn_hidden_dim": 48})
        assert "and 3 more" in str(caught.value)
        assert caught.value.exit_status == 2


def test_checkpoints_that_have_no_folder_to_lie_in(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/checkpoints").write_text("")
    with pytest.raises(RequestError, match="checkpoints is no folder"):
        run(tmp_path, steps=1)


def test_keys_that_compute_nothing_are_no_change(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="forge"):
        begin(tmp_path, elsewhere(saved), data={"prefetch": 4}, distributed={"timeout": 200.0})
    assert "train.max_steps was 4" in caplog.text
    assert "prefetch" not in caplog.text
    assert "timeout" not in caplog.text


def test_the_list_of_what_was_derived_is_no_change() -> None:
    assert changes('derived = ["data.seed"]\n', 'derived = ["eval.steps"]\n') == []


def test_another_seed_is_refused(saved: Path, tmp_path: Path) -> None:
    table, change = elsewhere(saved), {"train": {"seed": 2}, "data": {"seed": 1}}
    with pytest.raises(RefusedError, match=r"train\.seed: was 1"):
        begin(tmp_path, table, **change)
    assert begin(tmp_path, {**table, "allow_changed": ["seed"]}, **change).step == 4


def test_another_global_batch_is_refused(saved: Path, tmp_path: Path) -> None:
    change: dict[str, Any] = {"train": {"grad_accum_steps": 2}}
    with pytest.raises(RefusedError, match=r"took 2 sequences in .*, it takes 4 now \(set it to 2"):
        begin(tmp_path, elsewhere(saved), **change)
    assert begin(tmp_path, elsewhere(saved), data={"allow_changed": True}, **change).step == 4


def test_changed_data_is_refused(saved: Path, tmp_path: Path) -> None:
    changed: dict[str, Any] = {"data": {"synthetic": {"n_samples": 200}}}
    with pytest.raises(DataError, match="samples"):
        begin(tmp_path, elsewhere(saved), **changed)
    changed["data"]["allow_changed"] = True
    assert begin(tmp_path, elsewhere(saved), **changed).step == 4


def test_changes_are_told_with_what_they_affect(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="forge"):
        seen = begin(tmp_path, elsewhere(saved), optimizer={"lr": 0.5})
    assert "optimizer.lr was 0.01, is 0.5 (affects updates from here on)" in caplog.text
    assert caplog.text.count("0.5") == 1, caplog.text  # and no second time for each group
    assert "metrics" not in caplog.text
    assert seen.moved


@pytest.mark.filterwarnings("ignore")  # of tracing
@pytest.mark.parametrize("case", ["none", "compile", "recompute", "both"])
def test_names_do_not_depend_on_wrappers(case: str, saved: Path, straight: Any, tmp_path: Path) -> None:
    train = {
        "compile": case in ("compile", "both"),
        "compile_backend": "eager",
        "activation_checkpointing": "full" if case in ("recompute", "both") else "none",
    }
    wrapped: dict[str, Any] = {"train": train}
    killed(tmp_path / "w", 4, **wrapped, **CONSTANT)
    plain, other = open_checkpoint(saved), open_checkpoint(tmp_path / "w/a")
    assert set(other.index.tensors) == set(plain.index.tensors)
    resumed = run(tmp_path / "w", steps=6, **CONSTANT)  # plain from wrapped
    assert_same_run(straight, resumed)
    if case != "none":  # and wrapped from plain
        back = run(tmp_path / "x", steps=6, checkpoint=elsewhere(saved), **wrapped, **CONSTANT)
        assert_same_run(straight, back)


def test_another_dtype_is_told(saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="forge"):
        seen = begin(tmp_path, elsewhere(saved), train={"dtype": "fp64"})
    assert "was saved as torch.float32 and is torch.float64 here" in caplog.text
    assert "embed.weight was saved" in caplog.text
    whole = open_checkpoint(saved)
    assert all(torch.equal(whole.tensor(f"model/{n}").double(), w) for n, w in seen.weights.items())


def test_moments_of_what_froze_come_back(tmp_path: Path) -> None:
    """Trained for three updates, frozen for two, saved meanwhile, then trained again."""
    stages: dict[str, Any] = {
        "freeze": {"stages": [{"start_step": 4, "modules": ["embedding"]}, {"start_step": 6, "modules": []}]}
    }
    whole = run(tmp_path / "s", steps=8, **stages)
    killed(tmp_path / "k", 6, train={"max_steps": 8}, **stages)  # the last save is after 5: frozen
    saved = open_checkpoint(tmp_path / "k/a")
    assert saved.manifest.step == 5
    assert saved.tensor("optimizer/main/embed.weight/exp_avg").any()
    assert float(saved.tensor("optimizer/main/embed.weight/step")) == 3
    assert_same_run(whole, run(tmp_path / "k", steps=8, **stages))


def test_learning_rates_of_every_save_point(tmp_path: Path) -> None:
    """Linear warm-up over 4 of 12 updates, then decay: the rates found in the optimizer never shift."""

    class Rates(Observer):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def step_end(self, session: Any, step: int, result: Any) -> None:
            self.seen.append(session.optimizers["main"].optimizer.param_groups[0]["lr"])

    tables: dict[str, Any] = {"scheduler": {"name": "linear", "warmup_steps": 4}}
    rates = Rates()
    straight = run(tmp_path / "s", plugins=plugins_for(hooks={"observers": [rates]}), steps=12, **tables)
    assert len(set(rates.seen)) >= 11
    for k in range(1, 12):
        again = Rates()
        table = elsewhere(tmp_path / f"s/a/checkpoints/step_{k:08d}")
        resumed = run(
            tmp_path / f"{k}",
            plugins=plugins_for(hooks={"observers": [again]}),
            steps=12,
            checkpoint=table,
            **tables,
        )
        assert again.seen == rates.seen[k:]
        assert_same_run(straight, resumed)


class Counter:
    """State of a plugin: a number and a tensor."""

    def __init__(self, version: int = 1, compatible: Any = None) -> None:
        self.value, self.average = 0, torch.zeros(3)
        self.loaded: Any = None
        self.extra = CheckpointExtra(
            name="counter",
            version=version,
            state_dict=lambda: {"step": 99, "value": self.value, "average": self.average},
            load_state_dict=self.load,
            compatible=compatible,
        )

    def load(self, state: Mapping[str, Any]) -> None:
        self.loaded = state

    def hooks(self) -> dict[str, Any]:
        def after(step: Any, ok: Any) -> None:
            self.value += 1
            self.average += 0.5

        return {"forge_checkpoint_extras": lambda: [self.extra], "forge_after_updates": lambda: [after]}


@pytest.mark.parametrize("scope", ["global", "rank", "sharded"])
def test_state_of_plugins_travels(scope: str, tmp_path: Path) -> None:
    import attrs

    first, second = Counter(), Counter()
    first.extra = attrs.evolve(first.extra, scope=scope)
    second.extra = attrs.evolve(second.extra, scope=scope)
    run(tmp_path, plugins=plugins_for(hooks=first.hooks()), steps=4, **CONSTANT)
    resumed = run(tmp_path, plugins=plugins_for(hooks=second.hooks()), steps=5, **CONSTANT)
    assert len(resumed.losses) == 1  # a key of its own called "step" disturbs nothing
    assert second.loaded["value"] == 4
    assert torch.equal(second.loaded["average"], torch.full((3,), 2.0))


def test_state_of_plugins_is_refused_by_their_rule(tmp_path: Path) -> None:
    run(tmp_path, plugins=plugins_for(hooks=Counter(version=2).hooks()), steps=2, **CONSTANT)

    def attempt(counter: Counter | None, **table: Any) -> Any:
        plugins = plugins_for(hooks=counter.hooks() if counter else {})
        return run(tmp_path, plugins=plugins, steps=3, checkpoint=table, **CONSTANT)

    with pytest.raises(RefusedError, match="version 2, this plugin reads 1"):
        attempt(Counter(version=1))
    frozen = Counter(version=3, compatible=lambda version, state: f"{version}: other modules were frozen")
    with pytest.raises(RefusedError, match="2: other modules were frozen"):
        attempt(frozen)
    assert attempt(frozen, allow_changed=["extras"]).status == 0
    assert frozen.loaded is None


def test_missing_state_of_a_plugin(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(tmp_path, steps=2, **CONSTANT)
    with pytest.raises(RefusedError, match="no state 'counter' of plugin test"):
        run(tmp_path, plugins=plugins_for(hooks=Counter().hooks()), steps=3, **CONSTANT)
    run(tmp_path / "b", plugins=plugins_for(hooks=Counter().hooks()), steps=2, **CONSTANT)
    with caplog.at_level(logging.WARNING, logger="forge"):
        run(tmp_path / "b", steps=3, **CONSTANT)
    assert "nobody here takes it" in caplog.text


def test_state_that_cannot_be_saved_is_named(tmp_path: Path) -> None:
    counter = Counter()
    counter.average = object()  # type: ignore[assignment]
    hooks = {"forge_checkpoint_extras": lambda: [counter.extra]}
    with pytest.raises(CheckpointError, match="average: a object cannot be saved"):
        run(tmp_path, plugins=plugins_for(hooks=hooks), steps=2)


def test_rollback_goes_back_in_weights_and_on_in_data(tmp_path: Path) -> None:
    from test_saving import nan_forward  # bad at steps 3 and 4

    tables: dict[str, Any] = {"guard": {"action": "rollback", "max_consecutive": 5}, **CONSTANT}
    plugins = plugins_for(hooks={"forge_build_forward": nan_forward})
    rolled = run(tmp_path, plugins=plugins, steps=6, checkpoint={"interval": 1}, **tables)
    assert rolled.oks == [True, True, False, False, True, True]
    skipping = run(
        tmp_path / "skip",
        plugins=plugins_for(hooks={"forge_build_forward": nan_forward}),
        steps=6,
        **CONSTANT,
    )
    # the last save was of update 2, and bad updates change nothing: both see the same weights and samples
    assert rolled.losses[4:] == skipping.losses[4:]
    assert_same_weights(rolled.weights, skipping.weights)
    back = run(
        tmp_path / "back",
        plugins=plugins_for(hooks={"forge_build_forward": nan_forward}),
        steps=6,
        checkpoint={"interval": 0, "initial": True, "window": [0, 1]},
        **tables,
    )
    assert back.losses[4] != skipping.losses[4]  # from update 1, not 2
    assert moments(back)["main/embed.weight/step"] == 3  # updates 1, 5 and 6


def assert_same_weights(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    assert all(torch.equal(w, other[name]) for name, w in one.items())
