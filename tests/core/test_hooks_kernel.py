"""Discovery, loading, order and errors of plugins: what is broken harms nobody, and nothing is silent."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pluginkit import Package, installed, package

from forge_core import FORGE_API, AccumulateStep, contract, hookimpl
from forge_core.commands.loading import load
from forge_core.commands.plugins import describe
from forge_core.contract import Component, LossTerm, Metric, Observer, Transform
from forge_core.errors import ConfigError, PluginError
from forge_core.plugins import Candidate, PluginCatalog, Plugins
from forge_core.plugins.answers import METHODS, check_answer
from forge_core.plugins.plan import Plan
from forge_core.testing import isolated_plugins, plugin_object, run_tiny, tiny_config, tiny_session

COUNTING = """
    from forge_core import hookimpl
    from forge_core.contract import Observer

    forge_api = 1
    steps = []

    class Counter(Observer):
        def step_end(self, session, step, result):
            steps.append(step)

    @hookimpl
    def forge_observers(session):
        return [Counter()]
"""
BROKEN = "import a_module_that_is_not_there"
ORDERS = list(itertools.permutations(range(3)))


def three(folder: Path) -> list[Package]:
    return [
        package(folder, "good_a", COUNTING),
        package(folder, "broken_b", BROKEN),
        package(folder, "good_c", COUNTING),
    ]


def ours(plugins: Plugins) -> list[str]:
    return [name for name in plugins.names() if name in ("good_a", "broken_b", "good_c")]


# --- one broken plugin ----------------------------------------------------------------------------


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_broken_plugin_hides_no_other(tmp_path: Path, order: tuple[int, ...]) -> None:
    packages = three(tmp_path)
    with installed(packages[i] for i in order):
        plugins = Plugins()
        assert ours(plugins) == ["broken_b", "good_a", "good_c"]
        run = run_tiny(tiny_config(plugins=plugins, good_a=True, good_c=True), plugins, steps=3)
        counts = {one.module: sys.modules[one.module].steps for one in packages if one.module in sys.modules}
        assert run.status == 0
        assert counts == {packages[0].module: [1, 2, 3], packages[2].module: [1, 2, 3]}


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_broken_plugin_is_reported_with_its_package_and_error(
    tmp_path: Path, order: tuple[int, ...]
) -> None:
    packages = three(tmp_path)
    with installed(packages[i] for i in order):
        rows = {row["name"]: row for row in describe(Plugins())}
    assert [rows[name]["state"] for name in ("good_a", "broken_b", "good_c")] == ["works", "broken", "works"]
    assert rows["broken_b"]["package"] == "dist-broken_b"
    assert "No module named 'a_module_that_is_not_there'" in str(rows["broken_b"]["reason"])


def test_naming_a_broken_plugin_is_an_error_with_the_reason(tmp_path: Path) -> None:
    with installed(three(tmp_path)), pytest.raises((PluginError, ConfigError)) as caught:
        tiny_config(plugins=Plugins(), broken_b=True)
    assert "broken_b" in str(caught.value)
    assert "a_module_that_is_not_there" in str(caught.value)


def test_strict_mode_refuses_any_broken_plugin(tmp_path: Path) -> None:
    with installed(three(tmp_path)):
        tiny_config(plugins=Plugins())
        with pytest.raises(PluginError, match="broken_b"):
            tiny_config(plugins=Plugins(), run={"strict_plugins": True})


def test_a_module_that_ends_the_process_is_broken_like_any_other(tmp_path: Path) -> None:
    with installed([package(tmp_path, "quitter", "import sys; sys.exit(3)")]):
        assert "SystemExit" in str(Plugins().broken()["quitter"])


def test_components_of_a_plugin_that_fails_half_way_are_not_there() -> None:
    def forge_components() -> Any:
        yield Component(category="optimizer", name="half", target="nowhere:nothing")
        raise RuntimeError("half way")

    plugins = isolated_plugins({"half": plugin_object(forge_components=forge_components)})
    catalog = PluginCatalog(plugins)
    with pytest.raises(RuntimeError, match="half way") as caught:
        catalog.component("optimizer", "half/half")
    assert caught.value.__notes__ == ["raised by plugin half 0 in forge_components"]
    assert "half/half" not in isolated_names(plugins, "optimizer")


def isolated_names(plugins: Plugins, category: str) -> list[str]:
    """Names that the rest of the plugins offer, without those of plugin `half`."""
    rest = Plugins(installed=[c for c in plugins.installed if c.name != "half"])
    return list(PluginCatalog(rest).component_names(category))


def test_a_blocked_plugin_is_not_loaded(tmp_path: Path) -> None:
    with installed(three(tmp_path)):
        plugins = Plugins(blocked=["good_a"])
        with pytest.raises((PluginError, ConfigError), match="good_a is blocked"):
            tiny_config(plugins=plugins, good_a=True)
        assert {row["name"]: row["state"] for row in describe(plugins)}["good_a"] == "blocked"


@pytest.mark.parametrize("order", [ORDERS[0], ORDERS[-1]], ids=str)
def test_the_command_line_finds_packages_in_any_order(tmp_path: Path, order: tuple[int, ...]) -> None:
    """The same in a process of its own, from installed packages to the exit status."""
    packages = three(tmp_path)
    path = os.pathsep.join([str(packages[i].folder) for i in order] + sys.path)
    listing = forge(path, "plugins", "--json")
    found = {row["name"]: row["state"] for row in json.loads(listing.stdout)["plugins"]}
    assert (found["good_a"], found["broken_b"], found["good_c"]) == ("works", "broken", "works")
    assert forge(path, "check", "quickstart", "--good_a=true").returncode == 0
    refused = forge(path, "check", "quickstart", "--broken_b=true")
    assert refused.returncode == 2
    assert "broken_b" in refused.stderr
    assert "a_module_that_is_not_there" in refused.stderr
    assert "Traceback" not in refused.stderr


def forge(path: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "forge_core", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )


# --- the same twice, two of one name --------------------------------------------------------------


def test_one_plugin_named_twice_runs_once(tmp_path: Path) -> None:
    """By its table in a file, by a flag and by a component of it; and a second run counts for itself."""
    source = (
        COUNTING
        + """
    from forge_core.contract import Component

    @hookimpl
    def forge_components():
        return [Component(category="optimizer", name="sgd", target=__name__ + ":build")]

    def build(groups, config, options):
        import torch
        return torch.optim.SGD(groups, lr=config.lr)
    """
    )
    one = package(tmp_path, "twice", source)
    with installed([one]):
        plugins = Plugins()
        config = tiny_config("--twice=true", plugins=plugins, twice=True, optimizer={"name": "twice/sgd"})
        run_tiny(config, plugins, steps=5)
        steps = sys.modules[one.module].steps
        assert steps == [1, 2, 3, 4, 5]
        run_tiny(config, plugins, steps=5)
        assert steps == [1, 2, 3, 4, 5] * 2


def test_two_plugins_of_one_name_are_an_error_that_names_both(tmp_path: Path) -> None:
    packages = [
        package(tmp_path, "same", COUNTING, distribution="dist-one"),
        package(tmp_path, "same", COUNTING, distribution="dist-two"),
        package(tmp_path, "other", COUNTING),
    ]
    with installed(packages):
        plugins = Plugins()
        with pytest.raises(PluginError) as caught:
            plugins.load("same")
        plugins.load("other")
    assert "module_of_dist_one (dist-one 1.0)" in str(caught.value)
    assert "module_of_dist_two (dist-two 1.0)" in str(caught.value)


def test_two_packages_that_name_one_module_bring_one_plugin() -> None:
    twice = [
        Candidate(name="p", source="types", distribution=f"dist-{i}", version="1", loaded=None) for i in "ab"
    ]
    with pytest.raises(PluginError, match="two plugins"):
        Plugins(installed=[*twice, Candidate(name="p", source="json")]).load("p")
    assert Plugins(installed=twice).load("p").name == "p"


@pytest.mark.parametrize("name", ["core", "train", "model"])
def test_a_plugin_cannot_take_a_name_of_the_core(name: str) -> None:
    plugins = isolated_plugins({name: plugin_object()})
    with pytest.raises(PluginError, match=f"calls itself {name}"):
        plugins.load(name)


def test_two_loss_terms_of_one_name_are_an_error_that_names_both() -> None:
    def forge_extra_losses() -> list[LossTerm]:
        return [LossTerm(name="x", weight=1.0, term=lambda model, batch, output: output.loss_sum)]

    both = {name: plugin_object(forge_extra_losses=forge_extra_losses) for name in ("left", "right")}
    plugins = isolated_plugins(both)
    config = tiny_config(plugins=plugins, left=True, right=True)
    with pytest.raises(PluginError, match="plugins left and right both have the loss term 'x'"):
        run_tiny(config, plugins)


def test_a_component_does_not_replace_one_of_the_core() -> None:
    mine = Component(category="optimizer", name="adamw", target="mine:build")
    plugins = isolated_plugins({"mine": plugin_object(forge_components=[mine])})
    plugins.load("mine")
    catalog = PluginCatalog(plugins)
    assert catalog.component("optimizer", "adamw").target.startswith("forge_core.")
    assert catalog.component("optimizer", "mine/adamw") is mine


def test_one_plugin_that_declares_a_component_twice_is_refused() -> None:
    parts = [Component(category="optimizer", name="p", target=f"module:{name}") for name in ("a", "b")]
    plugins = isolated_plugins({"mine": plugin_object(forge_components=parts)})
    with pytest.raises(PluginError, match="module:a and module:b"):
        PluginCatalog(plugins).component("optimizer", "mine/p")


# --- names and arguments of hooks -----------------------------------------------------------------


def test_an_unknown_argument_names_plugin_hook_and_argument() -> None:
    def forge_after_updates(session: Any, model: Any, lr: float) -> list[Any]:
        return []

    with pytest.raises(PluginError) as caught:
        isolated_plugins({"mine": plugin_object(forge_after_updates=forge_after_updates)}).load("mine")
    for word in ("mine", "forge_after_updates", "'lr'", "session, model"):
        assert word in str(caught.value)


def test_a_misspelt_hook_is_an_error_with_the_nearest_name() -> None:
    plugin = plugin_object(forge_afterupdates=lambda session: [])
    with pytest.raises(
        PluginError, match=r"unknown hook forge_afterupdates[\s\S]*did you mean forge_after_updates"
    ):
        isolated_plugins({"mine": plugin}).load("mine")


def test_a_hook_without_its_marker_is_an_error() -> None:
    for name in ("forge_after_updates", "forge_after_update"):
        plugin = SimpleNamespace(**{name: lambda session: []})
        with pytest.raises(PluginError, match=rf"{name} is not marked[\s\S]*forge_core.hookimpl"):
            isolated_plugins({"mine": plugin}).load("mine")


def test_fewer_arguments_defaults_and_keywords_get_the_real_values() -> None:
    got: dict[str, Any] = {}

    def forge_observers(session: Any = None) -> list[Observer]:
        got["default"] = session
        return []

    def forge_extra_metrics(*, model: Any) -> list[Metric]:
        got["keyword"] = model
        return []

    def forge_after_updates(model: Any, mine: int = 7) -> list[Any]:
        got["own"] = mine
        return []

    plugins = isolated_plugins(
        {
            "mine": plugin_object(
                forge_observers=forge_observers,
                forge_extra_metrics=forge_extra_metrics,
                forge_after_updates=forge_after_updates,
                forge_evaluators={},
            )
        }
    )
    with tiny_session(tiny_config(plugins=plugins, mine=True), plugins) as session:
        assert got["default"] is session
        assert got["keyword"] is session.model
    assert got["own"] == 7


def test_hook_wrappers_are_refused() -> None:
    @hookimpl(wrapper=True)
    def forge_observers(session: Any) -> Any:
        return (yield)

    with pytest.raises(PluginError, match="is a hook wrapper"):
        isolated_plugins({"mine": SimpleNamespace(forge_observers=forge_observers)}).load("mine")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (5, "returned an int, not a list of LossTerms"),
        ({"a": 1}, "returned a dict, not a list of LossTerms"),
        ([{"name": "a"}], "has a dict among its answers, not a LossTerm"),
        ([Metric(name="m", op="sum", read=lambda: None)], "has a Metric among its answers, not a LossTerm"),
    ],
    ids=["number", "mapping", "dict", "metric"],
)
def test_an_answer_of_the_wrong_kind_names_plugin_and_hook(answer: Any, said: str) -> None:
    plugins = isolated_plugins({"mine": plugin_object(forge_extra_losses=answer)})
    plugins.load("mine")
    with pytest.raises(PluginError, match=f"plugin mine: forge_extra_losses {said}"):
        plugins.collect("forge_extra_losses", session=None, model=None)


@pytest.mark.parametrize(
    ("hook", "answer", "said"),
    [
        ("forge_build_mixer", 3, "returned an int, not an nn.Module"),
        ("forge_build_model", [3], "returned a list, not an nn.Module"),
        ("forge_flops", "3", "returned a str, not a number, nor Flops"),
        ("forge_build_initial_weights", 3, "returned an int, not a function"),
        ("forge_blocks_after", [3], "has an int among its answers, not an nn.Module"),
        ("forge_after_updates", [3], "has an int among its answers, not a function"),
        ("forge_after_updates", 3, "returned an int, not a list of functions"),
        ("forge_evaluators", {"a": 3}, "has an int among its answers, not a function"),
        (
            "forge_attention_masks",
            [len],
            'has a builtin.* among its answers, not a pair of "and" or "or" and',
        ),
        ("forge_attention_masks", 3, 'returned an int, not a list of pairs of "and" or "or" and a function'),
        ("forge_module_aliases", 3, "returned an int, not a list of Aliases"),
        ("forge_module_aliases", [3], "has an int among its answers, not an Alias"),
        ("forge_build_data", 3, "returned an int, which is no DataPipeline\n  hint: it lacks __enter__"),
        ("forge_build_forward", len, "returned a builtin.*, which is no Forward\n  hint: it lacks count"),
        ("forge_build_step_fn", len, "returned a builtin.*, which is no StepFn\n  hint: it lacks train"),
        ("forge_build_generator", 3, "returned an int, which is no Generator\n  hint: it lacks sample"),
        (
            "forge_build_checkpointer",
            3,
            "returned an int, which is no Checkpointer\n"
            "  hint: it lacks load, due, save, staged, drain, close",
        ),
        (
            "forge_build_step_fn",
            AccumulateStep,
            "returned the class AccumulateStep, which is no StepFn\n  hint: r",
        ),
    ],
)
def test_an_answer_that_no_run_can_use_names_plugin_and_hook(hook: str, answer: Any, said: str) -> None:
    with pytest.raises(PluginError, match=f"plugin mine: {hook} {said}"):
        check_answer("mine", hook, answer)


@pytest.mark.parametrize("hook", METHODS)
def test_what_is_asked_of_an_answer_is_in_its_protocol(hook: str) -> None:
    protocol, names = METHODS[hook]
    assert set(names) <= set(dir(getattr(contract, protocol)))


# --- errors while the loop runs -------------------------------------------------------------------


def failing_in_update_3(what: str) -> Any:
    """A plugin whose function in the loop raises in update 3."""
    calls = iter(range(1, 100))

    def fail(*_: Any) -> Any:
        if next(calls) == 3:
            raise ZeroDivisionError("in the third update")

    class Watching(Observer):
        def step_end(self, session: Any, step: int, result: Any) -> None:
            fail()

    def term(model: Any, batch: Any, output: Any) -> Any:
        fail()
        return output.loss_sum * 0

    return {
        "forge_after_updates": plugin_object(forge_after_updates=lambda: [fail]),
        "forge_observers": plugin_object(forge_observers=lambda: [Watching()]),
        "forge_extra_losses": plugin_object(
            forge_extra_losses=lambda: [LossTerm(name="mine", weight=1.0, term=term)]
        ),
        "forge_extra_metrics": plugin_object(
            forge_extra_metrics=lambda: [Metric(name="mine/x", op="sum", read=fail)]
        ),
    }[what]


@pytest.mark.parametrize(
    "hook", ["forge_after_updates", "forge_observers", "forge_extra_losses", "forge_extra_metrics"]
)
def test_an_exception_in_the_loop_keeps_its_type_and_names_the_plugin(hook: str, tmp_path: Path) -> None:
    plugins = isolated_plugins({"mine": failing_in_update_3(hook)})
    config = tiny_config(plugins=plugins, mine=True, run={"name": "failing"})
    with pytest.raises(ZeroDivisionError) as caught:
        run_tiny(config, plugins, steps=5, folder=tmp_path)
    assert caught.value.__notes__ == [f"raised by plugin mine 0 in {hook}"]
    left = json.loads((tmp_path / "failing" / "exit.json").read_text())
    assert left["status"] == 1
    assert f"plugin mine 0 in {hook}" in left["reason"]


MODULE = """
    from forge_core import hookimpl

    @hookimpl
    def forge_build_ffn(session, layer):
        from torch import nn

        calls = iter(range(100))

        class Fragile(nn.Module):
            def forward(self, x, context):
                return x * (1 / (2 - next(calls)))

        return Fragile()
"""


def test_an_exception_in_a_module_of_a_plugin_names_it_too(tmp_path: Path) -> None:
    """What runs in the loop without a wrapper is known by its code."""
    packages = [package(tmp_path, "fragile", MODULE, version="2.5"), package(tmp_path, "other", COUNTING)]
    with installed(packages):
        plugins = Plugins()
        config = tiny_config(plugins=plugins, fragile=True, other=True)
        with pytest.raises(ZeroDivisionError) as caught:
            run_tiny(config, plugins, steps=5)
    (note,) = caught.value.__notes__
    assert note.startswith("raised by plugin fragile 2.5 in module_of_dist_fragile.")
    assert "Fragile.forward" in note


def test_an_exception_of_the_core_names_no_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("forge_core.loop.accumulate.apply_update", fail)
    with installed([package(tmp_path, "other", COUNTING)]):
        plugins = Plugins()
        config = tiny_config(plugins=plugins, other=True)
        with pytest.raises(ZeroDivisionError) as caught:
            run_tiny(config, plugins)
    assert not hasattr(caught.value, "__notes__")


def test_an_exception_while_building_names_the_plugin() -> None:
    def forge_problems(config: Any) -> Any:
        yield from ()
        raise KeyError("oops")

    plugins = isolated_plugins({"mine": plugin_object(forge_problems=forge_problems)})
    with pytest.raises(KeyError) as caught:
        tiny_config(plugins=plugins, mine=True)
    assert caught.value.__notes__ == ["raised by plugin mine 0 in forge_problems"]


# --- order ----------------------------------------------------------------------------------------


def letter(name: str, written: list[str], **options: bool) -> Any:
    @hookimpl(**options)
    def forge_after_updates() -> list[Any]:
        return [lambda step, ok: written.append(name)]

    return SimpleNamespace(forge_api=1, forge_after_updates=forge_after_updates)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_contributions_come_by_name_however_they_were_found(order: tuple[int, ...]) -> None:
    written: list[str] = []
    names = "abc"
    candidates = [
        Candidate(name=names[i], source="x", version="0", loaded=letter(names[i], written)) for i in order
    ]
    plugins = Plugins(installed=candidates)
    run_tiny(tiny_config(plugins=plugins, a=True, b=True, c=True), plugins, steps=2)
    assert "".join(written) == "abcabc"


def test_first_and_last_are_obeyed() -> None:
    written: list[str] = []
    plugins = isolated_plugins(
        {
            "a": letter("a", written, trylast=True),
            "b": letter("b", written),
            "c": letter("c", written, tryfirst=True),
        }
    )
    run_tiny(tiny_config(plugins=plugins, a=True, b=True, c=True), plugins, steps=1)
    assert "".join(written) == "cba"


@pytest.mark.parametrize("reverse", [False, True])
def test_a_chain_of_transforms_has_one_result(reverse: bool) -> None:
    """x -> x + 1 by plugin a, x -> 10 x by plugin b: 20 from x = 1, since a comes before b."""
    values = [1]

    def transform(name: str, change: Any) -> Any:
        def apply(model: Any) -> Any:
            values.append(change(values[-1]))
            return model

        return plugin_object(
            forge_model_transforms=lambda: [Transform(phase="adapt", name=name, apply=apply)]
        )

    made = {"a": transform("a", lambda x: x + 1), "b": transform("b", lambda x: 10 * x)}
    candidates = [Candidate(name=n, source="x", version="0", loaded=made[n]) for n in made]
    plugins = Plugins(installed=candidates[::-1] if reverse else candidates)
    with tiny_session(tiny_config(plugins=plugins, a=True, b=True), plugins):
        assert values == [1, 2, 20]


def order_on_this_rank(order: list[int]) -> str:
    written: list[str] = []
    candidates = [
        Candidate(name="abc"[i], source="x", version="0", loaded=letter("abc"[i], written)) for i in order
    ]
    plugins = Plugins(installed=candidates)
    for name in "cab":
        plugins.load(name)
    for contribution in plugins.collect("forge_after_updates", session=None, model=None):
        contribution.value(1, True)
    return "".join(written) + Plan.of(plugins.collect("forge_after_updates")).fingerprint


def order_by_rank() -> str:
    import torch.distributed as dist

    return order_on_this_rank([0, 1, 2] if dist.get_rank() == 0 else [2, 0, 1])


def test_ranks_that_find_plugins_in_different_orders_agree(pool2: Any) -> None:
    first, second = pool2.run(order_by_rank)
    assert first == second
    assert first.startswith("abc")


# --- the version of the contract ------------------------------------------------------------------


@pytest.mark.parametrize("stated", [None, FORGE_API, (FORGE_API, FORGE_API), (0, FORGE_API + 5)], ids=str)
def test_a_plugin_for_this_contract_loads(stated: Any) -> None:
    plugin = plugin_object(forge_api=stated) if stated is not None else SimpleNamespace()
    assert isolated_plugins({"mine": plugin}).load("mine").name == "mine"


@pytest.mark.parametrize(
    ("stated", "said"),
    [
        (FORGE_API - 1, f"needs forge_api {FORGE_API - 1}, this forge-core has {FORGE_API}"),
        (FORGE_API + 1, f"needs forge_api {FORGE_API + 1}, this forge-core has {FORGE_API}"),
        ((FORGE_API + 1, FORGE_API + 3), f"needs forge_api {FORGE_API + 1} to {FORGE_API + 3}"),
        ("abc", "states forge_api = 'abc'"),
        (True, "states forge_api = True"),
        ((1,), "states forge_api = (1,)"),
    ],
    ids=str,
)
def test_a_plugin_for_another_contract_is_refused_with_both_numbers(stated: Any, said: str) -> None:
    plugins = isolated_plugins({"mine": plugin_object(forge_api=stated), "fits": plugin_object()})
    tiny_config(plugins=plugins, fits=True)
    with pytest.raises((PluginError, ConfigError)) as caught:
        tiny_config(plugins=plugins, mine=True)
    assert said in str(caught.value)
    assert "mine" in str(caught.value)


# --- choosing between plugins ---------------------------------------------------------------------


def test_a_choice_names_hooks_and_plugins_that_exist() -> None:
    plugins = isolated_plugins({"mine": plugin_object()})
    with pytest.raises(ConfigError) as caught:
        load(None, ["--run.choose.nosuch=mine", "--run.choose.step_fn=gone"], plugins=plugins)
    assert "run.choose.nosuch" in str(caught.value)
    assert "add a table [gone]" in str(caught.value)


# --- what it costs --------------------------------------------------------------------------------


@pytest.mark.alone
def test_finding_a_plugin_takes_at_most_five_milliseconds(tmp_path: Path) -> None:
    """The difference that 40 installed packages make, the best of five times each."""

    def seconds() -> float:
        took = []
        for _ in range(5):
            importlib.invalidate_caches()
            began = time.perf_counter()
            Plugins()
            took.append(time.perf_counter() - began)
        return min(took)

    packages = [package(tmp_path, f"many{i}", COUNTING) for i in range(40)]
    alone = seconds()
    with installed(packages):
        assert {f"many{i}" for i in range(40)} <= {found.name for found in Plugins().installed}
        each = (seconds() - alone) / 40
    print(f"{1e3 * each:.2f} ms a plugin")
    assert each <= 5e-3
