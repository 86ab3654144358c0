"""What else a run does under stages: losses of plugins, freezing, recomputation, compilation, samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ppkit import BASE, alone, differences, merged, on_ranks, run
from torch import nn

from forge_core.contract import Alias, Transform
from forge_core.model.generate import generate
from forge_core.testing import WorkerPool, plugin_object

TOLERANCE = 1e-10
HALVES = ["1f1b", "interleaved_1f1b", "interleaved_zero_bubble", "zbv"]


def compare(pool: WorkerPool, schedule: str, *tables: dict[str, Any]) -> None:
    both = merged(BASE, *tables, {"pp": {"size": 2, "schedule": schedule}})
    found = differences(alone(both), pool.run(on_ranks, both))
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize("schedule", HALVES)
def test_loss_terms_of_modules_hidden_states_and_logits(schedule: str, pool2: WorkerPool) -> None:
    compare(pool2, schedule, {"terms": {}})


@pytest.mark.parametrize(
    ("schedule", "mode"),
    [*((schedule, "full") for schedule in HALVES), ("1f1b", "selective"), ("interleaved_1f1b", "selective")],
)
def test_recomputed_blocks(schedule: str, mode: str, pool2: WorkerPool) -> None:
    compare(pool2, schedule, {"train": {"activation_checkpointing": mode, "max_steps": 3}})


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("schedule", HALVES)
def test_compiled_blocks(schedule: str, pool2: WorkerPool) -> None:
    compare(pool2, schedule, {"train": {"compile": True, "compile_backend": "aot_eager", "max_steps": 3}})


@pytest.mark.parametrize("schedule", HALVES)
def test_a_stage_that_does_not_train(schedule: str, pool2: WorkerPool) -> None:
    frozen = ["embedding", "layers.0", "layers.1"]
    compare(pool2, schedule, {"freeze": {"modules": frozen}})


@pytest.mark.parametrize(("schedule", "dtype"), [("1f1b", "bf16"), ("zbv", "bf16"), ("1f1b", "fp16")])
def test_low_precision(schedule: str, dtype: str, pool2: WorkerPool) -> None:
    """Nothing but the order of additions may differ: a few roundings, of 2 ** -9 in bf16."""
    sgd = {"optimizer": {"name": "plain/sgd", "lr": 0.1}, "plain": {}}
    tables = merged(BASE, sgd, {"train": {"dtype": dtype, "max_steps": 5}})
    found = differences(
        alone(tables), pool2.run(on_ranks, merged(tables, {"pp": {"size": 2, "schedule": schedule}}))
    )
    assert max(found.values()) < 2**-9, found


def test_settings_of_parameters_on_other_stages(pool2: WorkerPool) -> None:
    groups = [{"modules": "embedding", "lr_scale": 0.5}, {"modules": "head", "lr_scale": 2.0}]
    compare(pool2, "1f1b", {"optimizer": {"groups": groups}})


def test_a_window_without_a_target_changes_nothing(pool2: WorkerPool) -> None:
    compare(pool2, "1f1b", {"data_nothing": {}})


def test_a_bad_step_is_skipped_on_all_stages(pool2: WorkerPool) -> None:
    compare(pool2, "1f1b", {"spoil": {}})


def continued(tables: dict[str, Any]) -> list[list[int]]:
    """Greedy continuations of two prompts of different length by a trained model."""
    model: Any = run(tables).session.model
    return generate(model, [[3, 1, 4, 1, 5], [9, 2]], max_new_tokens=6, temperature=0.0)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zbv"])
@pytest.mark.parametrize("tied", [False, True])
def test_generation(schedule: str, tied: bool, pool2: WorkerPool) -> None:
    tables = merged(BASE, {"model": {"tie_embeddings": tied}})
    whole = continued(tables)
    for rank in pool2.run(continued, merged(tables, {"pp": {"size": 2, "schedule": schedule}})):
        assert rank == whole


def scored(tables: dict[str, Any]) -> list[Any]:
    """What the session's forward gives for the model as a whole, as evaluators call it."""
    session = run(tables).session
    batch = session.stream.take(1)[0] if hasattr(session.stream, "batch") else None
    if batch is None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(64, (2, 17), generator=generator)
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].clone()}
    with torch.no_grad():
        output = session.forward(session.model, batch)
    return [float(output.loss_sum), output.token_loss.tolist()]


def test_evaluators_may_call_the_model_as_a_whole(pool2: WorkerPool) -> None:
    whole = scored(BASE)
    for rank in pool2.run(scored, merged(BASE, {"pp": {"size": 2}})):
        assert rank[0] == pytest.approx(whole[0], rel=1e-10)
        torch.testing.assert_close(torch.tensor(rank[1]), torch.tensor(whole[1]), rtol=1e-10, atol=1e-10)


def test_evaluating_changes_nothing(pool2: WorkerPool) -> None:
    often = merged(BASE, {"pp": {"size": 2}, "eval": {"interval": 1}})
    never = merged(BASE, {"pp": {"size": 2}, "eval": {"interval": 0}})
    for a, b in zip(pool2.run(on_ranks, often), pool2.run(on_ranks, never), strict=True):
        assert a["losses"] == b["losses"]
        assert all(torch.equal(value, b["weights"][name]) for name, value in a["weights"].items())


class LowRank(nn.Module):
    """A matrix and a product of two thin ones beside it (Hu et al. 2021)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given: torch.Tensor = self.base(x) + self.up(self.down(x))
        return given


def thin_queries(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        if isinstance(getattr(module, "q_proj", None), nn.Linear):
            module.q_proj = LowRank(module.q_proj)  # type: ignore[arg-type]
    return model


def counted_flops(tables: dict[str, Any]) -> tuple[float, list[float]]:
    """FLOPs of a token under the last freeze stage, and the losses."""
    lora = plugin_object(
        forge_model_transforms=[Transform(phase="modify", name="lora", apply=thin_queries)],
        forge_module_aliases=[Alias(name="base", patterns=("*base*", "*ffn*"))],
    )
    found = run(tables, lora=lora)
    flops = found.session.metrics.meter.flops_per_token
    assert flops is not None
    return flops, found.losses


@pytest.mark.parametrize("tied", [False, True])
def test_frozen_weights_spare_what_they_do_in_one_process(tied: bool, pool2: WorkerPool) -> None:
    """Whichever rank has them: a token passes all stages."""
    freeze = {"modules": [], "stages": [{"start_step": 3, "modules": ["base", "embed", "layers.3"]}]}
    model = {"n_layers": 4, "tie_embeddings": tied}
    tables = merged(BASE, {"lora": {}, "model": model, "freeze": freeze, "train": {"max_steps": 2}})
    trained, _ = counted_flops(tables)
    tables["train"]["max_steps"] = 4
    whole, losses = counted_flops(tables)
    assert whole < trained
    for flops, seen in pool2.run(counted_flops, merged(tables, {"pp": {"size": 2}})):
        assert flops == whole
        assert seen == pytest.approx(losses, rel=1e-10)
