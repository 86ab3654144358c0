"""The contract with plugin authors: hooks are documented, tested and named by the rule; public names stay."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import forge_core
import forge_core.contract
import forge_core.testing

ROOT = Path(__file__).parents[2]
SPECS = ROOT / "packages/forge-core/src/forge_core/hookspecs.py"
PAGE = (ROOT / "docs" / "hooks.md").read_text(encoding="utf-8")
HOOKS = {
    node.name: node
    for node in ast.parse(SPECS.read_text(encoding="utf-8")).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("forge_")
}
TESTS = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^ *def (test_hook_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
}

each_hook = pytest.mark.parametrize("hook", HOOKS)


def signature(node: ast.FunctionDef) -> str:
    assert node.returns is not None, node.name
    return f"{node.name}({ast.unparse(node.args)}) -> {ast.unparse(node.returns)}"


@each_hook
def test_a_hook_has_a_heading_with_its_exact_signature(hook: str) -> None:
    assert re.search(rf"^### `{re.escape(signature(HOOKS[hook]))}`$", PAGE, re.MULTILINE), signature(
        HOOKS[hook]
    )


@each_hook
def test_a_hook_has_a_docstring(hook: str) -> None:
    assert ast.get_docstring(HOOKS[hook])


@each_hook
def test_a_hook_has_a_test_of_its_name(hook: str) -> None:
    assert f"test_hook_{hook.removeprefix('forge_')}" in TESTS


@each_hook
def test_a_hook_has_an_example(hook: str) -> None:
    text = PAGE.partition(f"### `{hook}(")[2].partition("\n##")[0]
    assert f"def {hook}(" in text


def test_headings_come_in_the_order_of_the_specifications() -> None:
    assert re.findall(r"^### `(\w+)\(", PAGE, re.MULTILINE) == list(HOOKS)


@each_hook
def test_a_hook_is_named_by_its_kind(hook: str) -> None:
    """`forge_build_*` has one answer, which may be None; any other name holds a plural and has many."""
    returns = ast.unparse(HOOKS[hook].returns)  # type: ignore[arg-type]
    if hook.startswith("forge_build_"):
        assert returns.endswith(" | None"), f"{hook} must be able to decline"
    else:
        assert any(word.endswith("s") for word in hook.split("_")[1:]), f"{hook} is no plural"
        once = {"forge_tables": "type | None", "forge_flops": "float | Flops | None"}
        assert returns == once.get(hook) or returns.startswith(("Iterable[", "Mapping["))


def test_public_names_of_the_core() -> None:
    """A name that goes, or changes its meaning, breaks plugins: move FORGE_API and say so in changes/."""
    assert sorted(forge_core.__all__) == [
        "AccumulateStep",
        "BatchStream",
        "FORGE_API",
        "StepFn",
        "StepResult",
        "TrainingSession",
        "__version__",
        "apply_update",
        "attach_loss",
        "build_session",
        "count_step",
        "frozen_twin",
        "hookimpl",
        "new_session",
        "run_training_loop",
        "select_step_fn",
        "text_step",
        "train",
    ]
    assert all(getattr(forge_core, name) is not None for name in forge_core.__all__)


def test_public_names_of_the_contract() -> None:
    assert sorted(forge_core.contract.__all__) == [
        "Alias",
        "Architecture",
        "AttentionMixer",
        "Batch",
        "BatchStream",
        "CheckpointExtra",
        "Checkpointer",
        "Component",
        "DataPipeline",
        "EvaluationSet",
        "Evaluator",
        "Flops",
        "Forward",
        "Generator",
        "InitialWeights",
        "LayerContext",
        "LayerInfo",
        "LossTerm",
        "MeshAxis",
        "Metric",
        "Mixer",
        "NamedOptimizer",
        "Observer",
        "Output",
        "PHASES",
        "SampleSource",
        "SplitForward",
        "SplitSpec",
        "SplittableModel",
        "StepFn",
        "StepResult",
        "TensorPlan",
        "TensorRule",
        "Transform",
        "UnsuitedError",
        "Writer",
    ]
    assert all(hasattr(forge_core.contract, name) for name in forge_core.contract.__all__)


def test_public_names_of_the_testing_kit() -> None:
    assert sorted(forge_core.testing.__all__) == [
        "PluginConformance",
        "TinyRun",
        "WorkerError",
        "WorkerPool",
        "WorkerTimeoutError",
        "isolated_plugins",
        "plugin_object",
        "run_tiny",
        "tiny_config",
        "tiny_model",
        "tiny_session",
    ]
    assert all(getattr(forge_core.testing, name) is not None for name in forge_core.testing.__all__)
