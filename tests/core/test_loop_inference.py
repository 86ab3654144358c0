"""A session that only uses a model."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from forge_core.config.tables import DistributedConfig, ModelConfig, TrainConfig
from forge_core.loop.build import new_session
from forge_core.loop.evaluate import evaluate
from forge_core.loop.inference import build_for_inference, for_one_process
from forge_core.testing import isolated_plugins, plugin_object, tiny_config, tiny_session


def test_a_configuration_for_one_process() -> None:
    plugins = isolated_plugins({"mine": plugin_object(forge_build_initial_weights=lambda session: None)})
    config = tiny_config(
        plugins=plugins, mine=True, model={"init_from": "x"}, train={"compile": True, "device": "cpu"}
    )
    alone = for_one_process(config)
    assert alone[ModelConfig].init_from is None
    assert not alone[TrainConfig].compile
    assert alone[DistributedConfig] == DistributedConfig()
    assert alone[ModelConfig].dim == config[ModelConfig].dim


def test_it_evaluates_like_a_session_that_trains() -> None:
    config, plugins = tiny_config(), isolated_plugins()
    with ExitStack() as stack:
        session = build_for_inference(new_session(for_one_process(config), plugins, stack), data=True)
        assert not session.optimizers
        assert session.checkpointer is None
        found = evaluate(session)
    with tiny_session(config, isolated_plugins()) as whole:
        assert evaluate(whole) == found
    assert found["eval/loss"] > 0


def test_without_data_it_generates() -> None:
    config, plugins = tiny_config(model={"vocab_size": 257, "max_seq_len": 32}), isolated_plugins()
    with ExitStack() as stack:
        session = build_for_inference(new_session(for_one_process(config), plugins, stack))
        assert session.generator is not None
        [text] = session.generator.generate(session, ["a"], max_new_tokens=3, temperature=0)
        assert len(text.encode(errors="replace")) <= 9
        assert tuple(session.data.evaluation) == ()


def test_without_memory_it_has_names_and_shapes() -> None:
    """Transforms that change modules are in, and no tensor has memory."""
    from torch import nn

    from forge_core.contract import Transform

    def widen(model: Any) -> Any:
        model.extra = nn.Linear(2, 3, device="meta")
        return model

    def transforms() -> list[Transform]:
        return [Transform(phase="modify", name="widen", apply=widen)]

    plugins = isolated_plugins({"mine": plugin_object(forge_model_transforms=transforms)})
    config = tiny_config(plugins=plugins, mine=True)
    with ExitStack() as stack:
        session = build_for_inference(new_session(for_one_process(config), plugins, stack), memory=False)
    parameters = dict(session.model.named_parameters())
    assert all(parameter.is_meta for parameter in parameters.values())
    assert parameters["extra.weight"].shape == torch.Size((3, 2))
    assert not hasattr(session, "forward")
