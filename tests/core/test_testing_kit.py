"""The testing kit itself: what it promises to plugin authors, and that its suite finds what it is for."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import SkipTest

import pytest
import torch
import torch.distributed as dist

from forge_core import hookimpl
from forge_core.config import ConfigError, key, table
from forge_core.config.tables import ModelConfig, TrainConfig
from forge_core.contract import CheckpointExtra, LossTerm, Metric
from forge_core.testing import (
    PluginConformance,
    WorkerError,
    WorkerPool,
    WorkerTimeoutError,
    isolated_plugins,
    plugin_object,
    run_tiny,
    tiny_config,
    tiny_model,
    tiny_session,
)

# --- tiny runs


def test_a_tiny_configuration_is_laid_over_key_by_key() -> None:
    config = tiny_config("--train.seed=5", model={"n_layers": 1}, train={"max_steps": 7})
    assert (config[ModelConfig].dim, config[ModelConfig].n_layers, config[ModelConfig].vocab_size) == (
        16,
        1,
        64,
    )
    assert (config[TrainConfig].max_steps, config[TrainConfig].seed) == (7, 5)
    assert tiny_config(data={"source": "text"})[ModelConfig].vocab_size == 256 + 1
    with pytest.raises(ConfigError, match="max_stps"):
        tiny_config(train={"max_stps": 7})


def test_a_tiny_run_leaves_what_it_says() -> None:
    run = run_tiny(steps=4)
    assert run.status == 0
    assert [len(values) for values in (run.losses, run.objectives, run.grad_norms, run.oks)] == [4] * 4
    assert run.metric("train/loss") == pytest.approx(run.losses)
    assert (run.folder / "exit.json").exists()
    assert set(run.weights) == set(dict(tiny_model().named_parameters()))
    assert {entry.plugin for entry in run.session.plan.entries} == {"core"}


def test_a_tiny_run_is_quick_and_leaves_nothing_behind() -> None:
    run_tiny(steps=1)
    begin = time.perf_counter()
    run = run_tiny(steps=3)
    assert time.perf_counter() - begin < 10
    folder = run.folder
    assert folder.exists()
    del run
    assert not folder.exists()


def test_a_tiny_run_disturbs_neither_random_state_nor_plugins(tmp_path: Path) -> None:
    plugins = isolated_plugins()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    run = run_tiny(tiny_config(run={"name": "kept"}), plugins, folder=tmp_path)
    assert torch.rand(2).equal(expected)
    assert run.folder == tmp_path / "kept"
    assert len(plugins.core) == len(isolated_plugins().core)


def test_a_failed_tiny_run_raises_and_cleans_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail(step: int, ok: Any) -> None:
        raise ZeroDivisionError

    plugins = isolated_plugins({"mine": plugin_object(forge_after_updates=lambda: [fail])})
    with pytest.raises(ZeroDivisionError):
        run_tiny(tiny_config(plugins=plugins, mine=True), plugins)
    assert list(tmp_path.iterdir()) == []


def test_a_tiny_session_has_not_trained() -> None:
    with tiny_session() as session:
        assert session.step == 0
        assert not session.run.path.exists()
        assert session.model(torch.zeros(1, 4, dtype=torch.long)).shape == (1, 4, 16)


def test_plugin_objects_take_functions_constants_and_marked_functions() -> None:
    written: list[str] = []

    @hookimpl(trylast=True)
    def forge_after_updates() -> list[Any]:
        return [lambda step, ok: written.append("last")]

    plugins = isolated_plugins(
        {
            "a": plugin_object(forge_after_updates=forge_after_updates),
            "b": plugin_object(forge_after_updates=[lambda step, ok: written.append("constant")]),
        }
    )
    run_tiny(tiny_config(plugins=plugins, a=True, b=True), plugins, steps=1)
    assert written == ["constant", "last"]


# --- processes


def where_am_i(value: Any) -> dict[str, Any]:
    total = torch.ones(2, dtype=torch.float64) * dist.get_rank()
    dist.all_reduce(total)
    return {
        "rank": dist.get_rank(),
        "environment": (os.environ["RANK"], os.environ["WORLD_SIZE"]),
        "process": os.getpid(),
        "sum": total,
        "given": value,
        "threads": torch.get_num_threads(),
        "folder": Path.cwd(),
        "random": torch.rand(1).item(),
    }


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError(f"rank {rank} only")
    dist.barrier()


def hang_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


def end_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        os._exit(7)


def own_group() -> int:
    dist.init_process_group("gloo")
    return dist.get_world_size()


def not_plain() -> Any:
    return object()


def test_a_pool_runs_on_every_rank_and_brings_back_what_is_plain(pool2: WorkerPool) -> None:
    given = [1, 2.5, "x", None, {"tensor": torch.arange(3)}]
    first, second = pool2.run(where_am_i, given)
    assert (first["rank"], second["rank"]) == (0, 1)
    assert second["environment"] == ("1", "2")
    assert first["sum"].equal(torch.ones(2, dtype=torch.float64))
    assert second["given"][:4] == given[:4]
    assert second["given"][4]["tensor"].equal(torch.arange(3))
    assert first["threads"] == 1
    assert first["random"] == second["random"]
    assert first["folder"] == str(Path.cwd())


def test_processes_stay_between_calls_and_tests(pool2: WorkerPool) -> None:
    before = [answer["process"] for answer in pool2.run(where_am_i, 0)]
    begin = time.perf_counter()
    after = [answer["process"] for answer in pool2.run(where_am_i, 0, group="fresh")]
    assert time.perf_counter() - begin < 5
    assert before == after
    assert os.getpid() not in before


def test_a_function_may_make_its_own_group(pool2: WorkerPool) -> None:
    assert pool2.run(own_group, group="none") == [2, 2]
    assert pool2.run(own_group, group="none") == [2, 2]
    assert pool2.run(where_am_i, 0)[1]["rank"] == 1


def test_what_a_function_raises_comes_back_with_its_traceback(pool2: WorkerPool) -> None:
    with pytest.raises(WorkerError, match=r"fail_on[\s\S]*KeyError: 'rank 1 only'") as caught:
        pool2.run(fail_on, 1)
    assert caught.value.failures[1].kind == "KeyError"
    assert len(pool2.run(where_am_i, 0)) == 2, "the pool works on"


def test_only_data_travels_and_only_functions_that_can_be_found(pool2: WorkerPool) -> None:
    with pytest.raises(WorkerError, match="a object cannot travel"):
        pool2.run(not_plain)
    with pytest.raises(TypeError, match="cannot travel"):
        pool2.run(where_am_i, object())
    with pytest.raises(ValueError, match="at the top of a module"):
        pool2.run(lambda: 1)
    with pytest.raises(ValueError, match="not shared, fresh or none"):
        pool2.run(not_plain, group="other")


@pytest.mark.slow
def test_a_hang_is_shown_and_ends_only_the_pools_own_processes() -> None:
    with WorkerPool(2) as pool:
        before = [answer["process"] for answer in pool.run(where_am_i, 0)]
        with pytest.raises(WorkerTimeoutError, match=r"rank 1: timeout[\s\S]*in hang_on") as caught:
            pool.run(hang_on, 1, timeout=1.0)
        assert list(caught.value.failures) == [1]
        assert not any(Path(f"/proc/{process}").exists() for process in before)
        after = [answer["process"] for answer in pool.run(where_am_i, 0)]
        assert not set(before) & set(after), "it works on, with new processes"
        with pytest.raises(WorkerError, match="ended ---\nwith status 7"):
            pool.run(end_on, 0)
        assert not any(Path(f"/proc/{process}").exists() for process in after)


# --- the conformance suite finds what it is for


@table
class GoodConfig:
    """A table for tests."""

    weight: float = key(0.5, ge=0, help="Weight of the term.")


def term(name: str) -> LossTerm:
    return LossTerm(name=name, weight=0.1, term=lambda model, batch, output: output.hidden.square().sum())


def good(**changes: Any) -> SimpleNamespace:
    state = {"count": 1}

    def load(saved: Mapping[str, Any]) -> None:
        state.update(saved)

    extra = CheckpointExtra(name="c", version=1, state_dict=lambda: dict(state), load_state_dict=load)
    hooks = {
        "forge_tables": lambda: GoodConfig,
        "forge_extra_losses": lambda: [term("good")],
        "forge_extra_metrics": lambda: [Metric(name="good/one", op="sum", read=lambda: torch.ones(()))],
        "forge_checkpoint_extras": lambda: [extra],
    }
    return plugin_object(**{**hooks, **changes})


class TestGoodPlugin(PluginConformance):
    plugin = "good"
    config: ClassVar = {"good": {"weight": 0.25}}
    module = good()


@table
class SilentConfig:
    weight: float = key(0.5, help="")


def noisy_losses() -> list[LossTerm]:
    noise = time.perf_counter_ns() % 1000 / 1000

    def noisy(model: Any, batch: Any, output: Any) -> Any:
        return output.hidden.square().sum() * noise

    return [LossTerm(name="good", weight=1.0, term=noisy)]


def forgetful() -> list[CheckpointExtra]:
    counts = iter(range(100))
    return [
        CheckpointExtra(
            name="c",
            version=1,
            state_dict=lambda: {"count": next(counts)},
            load_state_dict=lambda state: None,
        )
    ]


HELD: list[Any] = []


def hold(session: Any) -> list[Any]:
    HELD.append(session)
    return []


FAULTS: dict[str, tuple[Any, str]] = {
    "test_it_states_the_contract_it_was_built_for": (
        SimpleNamespace(forge_tables=good().forge_tables),
        "forge_api",
    ),
    "test_it_loads": (SimpleNamespace(forge_api=1), "hookimpl"),
    "test_every_key_says_what_it_is": (good(forge_tables=lambda: SilentConfig), "weight"),
    "test_problems_come_as_problems": (good(forge_problems=lambda: ["no Problem"]), "not a Problem"),
    "test_it_trains_and_does_so_again": (good(forge_extra_losses=noisy_losses), "different losses"),
    "test_what_it_measures_carries_its_name": (good(forge_extra_losses=lambda: [term("other")]), "other"),
    "test_its_checkpoint_extras_go_round": (
        good(forge_checkpoint_extras=forgetful),
        "different after loading",
    ),
    "test_nothing_holds_a_run_that_has_ended": (good(forge_observers=hold), "still held"),
}


@pytest.mark.parametrize("check", FAULTS)
def test_the_suite_finds_a_faulty_plugin(check: str) -> None:
    module, said = FAULTS[check]
    suite = type("Suite", (PluginConformance,), {"plugin": "good", "module": module})()
    with pytest.raises(Exception, match=said):
        getattr(suite, check)()


def test_the_suite_skips_what_an_object_cannot_show() -> None:
    suite = type(
        "Suite", (PluginConformance,), {"plugin": "bare", "module": plugin_object(forge_observers=[])}
    )()
    for check in (suite.test_importing_it_imports_no_torch, suite.test_every_key_says_what_it_is):
        with pytest.raises(SkipTest):
            check()


def test_the_suite_finds_torch_in_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "heavy_plugin.py").write_text("import torch\nforge_api = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    import heavy_plugin  # type: ignore[import-not-found]

    suite = type("Suite", (PluginConformance,), {"plugin": "heavy", "module": heavy_plugin})()
    with pytest.raises(AssertionError, match="torch was imported"):
        suite.test_importing_it_imports_no_torch()


def test_an_interrupted_run_leaves_no_answers_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, killed = WorkerPool(2), []

    def interrupted(limit: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "_start", lambda: None)
    monkeypatch.setattr(pool, "_answers", interrupted)
    monkeypatch.setattr(pool, "_kill", lambda: killed.append(True))
    with pytest.raises(KeyboardInterrupt):
        pool.run(test_an_interrupted_run_leaves_no_answers_to_the_next)
    assert killed == [True]
