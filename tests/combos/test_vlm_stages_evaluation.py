"""Evaluations of a model that sees and is cut into stages measure what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from forge_core.loop.evaluate import evaluate
from forge_core.plugins import Plugins
from forge_core.testing import tiny_config, tiny_session
from forge_core.testing.pool import WorkerPool

pytestmark = [pytest.mark.packages("pp", "vlm"), pytest.mark.slow]
METRICS = ["exact_match", "vqa_accuracy", "relaxed_accuracy", "caption_loss", "multiple_choice"]
CROSS = {"fusion": "cross_attention", "cross_attention": {"every": 2}}


def measured(found: dict[str, Any]) -> dict[str, float]:
    """All metrics of a model with drawn weights, by the name of each in the whole model."""
    plugins = Plugins()
    with tiny_session(tiny_config(plugins=plugins, **found), plugins) as session, torch.no_grad():
        for name, parameter in sorted(session.freeze.named.items()):
            generator = torch.Generator().manual_seed(sum(name.encode()))
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.2)
        return evaluate(session)


@pytest.mark.parametrize("vlm", [{}, CROSS], ids=["joint", "cross_attention"])
def test_two_stages_measure_what_one_process_does(
    pool2: WorkerPool, tmp_path: Path, vlm: dict[str, Any]
) -> None:
    from vlmkit import tables, write_samples

    records: list[dict[str, Any]] = [
        {
            "image": f"{n % 6}.png",
            "prompt": f"what{n}? ",
            "choices": ["a cat", "a dog", "two"],
            "answer": n % 3,
        }
        for n in range(10)
    ]
    folder = write_samples(tmp_path, [*records, {"prompt": "1 ", "choices": ["12", "13"], "answer": 0}])
    sets = [{"name": "all", "source": "vlm/images", "path": str(folder)}]
    found = tables(folder, model={"n_layers": 4}, train={"batch_size": 4, "grad_accum_steps": 1})
    found["eval"] = {"sets": sets, "steps": 0, "batch_size": 3}
    found["vlm"] |= {"answer_tokens": 4, "metrics": METRICS, **vlm}
    expected = measured(found)
    staged = {**found, "pp": {"size": 2, "schedule": "gpipe"}}
    staged["train"] = {**found["train"], "batch_size": 2, "grad_accum_steps": 2}
    for each in pool2.run(measured, staged, timeout=110):
        assert each == pytest.approx(expected, rel=1e-9)
    assert {f"eval/{name}" for name in METRICS} <= set(expected)
