"""Going on from a checkpoint of a model whose weights fit, and which computes something else."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
from ckptkit import plugins_for, run

import forge_ckpt.plugin
from forge_ckpt.changes import changes, of_the_model
from forge_ckpt.errors import RefusedError
from forge_core.config import key, table
from forge_core.contract import Component
from forge_core.testing import isolated_plugins, plugin_object, tiny_config

CONSTANT = {"scheduler": {"name": "constant"}}
GATED = {"gated_mlp": True}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run(folder, steps=1, model=GATED, **CONSTANT)
    return folder / "a"


def go_on(saved: Path, folder: Path, model: dict[str, Any], **checkpoint: Any) -> Any:
    place = {"interval": 0, "resume": str(saved), **checkpoint}
    return run(folder, plugins=plugins_for(), steps=2, model={**GATED, **model}, checkpoint=place, **CONSTANT)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"rope_theta": 5000.0}, r"model\.rope_theta: was 10000\.0 in .*, is 5000\.0"),
        ({"norm_eps": 1e-6}, r"model\.norm_eps: was 1e-05 in .*, is 1e-06"),
        ({"n_heads": 4}, r"model\.n_heads: was 2 in .*, is 4"),
        ({"activation": "relu"}, r"model\.activation: was 'silu' in .*, is 'relu'"),
        ({"sliding_window": 4}, r"model\.sliding_window: was absent in .*, is 4"),
        ({"logit_softcap": 30.0}, r"model\.logit_softcap: was absent in .*, is 30\.0"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            r"rope_scaling\.type: was 'none' in .*, is 'linear'\n.*rope_scaling\.factor: was 1\.0",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_it_is_refused_with_both_values(
    model: dict[str, Any], told: str, saved: Path, tmp_path: Path
) -> None:
    with pytest.raises(RefusedError, match=told) as caught:
        go_on(saved, tmp_path, model)
    assert str(caught.value).count('checkpoint.allow_changed = ["model"]') == 1
    with pytest.raises(RefusedError, match=told):
        go_on(saved, tmp_path, model, optimizer=False)


def test_ways_to_go_on_with_another_model(
    saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = {"rope_theta": 5000.0}
    with caplog.at_level(logging.WARNING, logger="forge"):
        assert len(go_on(saved, tmp_path / "1", other, allow_changed=["model"]).losses) == 1
    assert "model.rope_theta was 10000.0, is 5000.0" in caplog.text
    assert len(go_on(saved, tmp_path / "2", other, weights_only=True).losses) == 2
    assert len(go_on(saved, tmp_path / "3", other, include=["layers.*"]).losses) == 2


@pytest.mark.parametrize(
    "model",
    [{"dropout": 0.1}, {"init_std": 0.5}, {"attention": "mask"}, {"max_seq_len": 32}],
    ids=lambda value: next(iter(value)),
)
def test_what_computes_nothing_else_goes_on_with_a_notice(
    model: dict[str, Any], saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="forge"):
        assert len(go_on(saved, tmp_path, model).losses) == 1
    assert f"model.{next(iter(model))} was " in caplog.text


def test_a_model_that_does_not_fit_is_told_by_its_weights(saved: Path, tmp_path: Path) -> None:
    """No flag would help, so none is offered."""
    with pytest.raises(RefusedError, match=r"is .* here and .* in ") as caught:
        go_on(saved, tmp_path, {"ffn_hidden_dim": 48, "rope_theta": 5000.0})
    assert "allow_changed" not in str(caught.value)


def test_keys_that_an_earlier_release_did_not_have_had_their_defaults() -> None:
    now = tiny_config(model={"logit_softcap": 30.0})
    lines = now.to_toml().splitlines()
    names = ("norm_eps", "layer_types", "head_dim", "gated_mlp", "beta_fast", "logit_softcap")
    before = "\n".join(line for line in lines if line.partition(" = ")[0] not in names)
    found = changes(before, now.to_toml())
    assert {path.rpartition(".")[2] for path, *_ in found} == set(names)
    assert of_the_model(found, now) == [("model.logit_softcap", None, 30.0)]


@table
class PickedOptions:
    """Options of a part."""

    width: int = key(3, help="Computes.")
    kernel: str = key("a", help="Does not.", computes=False)


@table
class InnerConfig:
    """A table in a table."""

    part: str = key("one", component="other_part", help="Which part.")
    writer: str = key("two", component="other_writer", help="Which writer.", computes=False)


@table
class OtherConfig:
    """A family's table."""

    computes: ClassVar[bool] = True
    top: int = key(2, help="Computes.")
    rate: float = key(0.5, help="Does not.", computes=False)
    inner: InnerConfig = key(factory=InnerConfig, help="Below.")
    quiet: InnerConfig = key(factory=InnerConfig, help="Below, and apart.", computes=False)


@table
class SilentConfig:
    """A table that says nothing of what it computes, but for one key."""

    some: int = key(1, help="Unknown.")
    loud: int = key(1, help="Computes.", computes=True)


def test_plugins_say_which_of_their_keys_make_another_model() -> None:
    options = f"{__name__}:PickedOptions"
    parts = [
        Component(category="other_part", name="one", target=f"{__name__}:run", options=options),
        Component(category="other_part", name="unused", target=f"{__name__}:run", options=options),
        Component(category="other_writer", name="two", target=f"{__name__}:run", options=options),
    ]
    plugins = isolated_plugins(
        {
            "other": plugin_object(forge_tables=OtherConfig, forge_components=lambda: parts),
            "silent": plugin_object(forge_tables=SilentConfig),
            "checkpoint": forge_ckpt.plugin,
        }
    )
    options_now = {"width": 4, "kernel": "b"}
    inner = {"one": options_now, "unused": options_now, "two": options_now}
    other = {"top": 3, "rate": 0.1, "inner": inner, "quiet": inner}
    before = tiny_config(plugins=plugins, other=True, silent=True)
    now = tiny_config(plugins=plugins, other=other, silent={"some": 2, "loud": 2})
    found = changes(before.to_toml(), now.to_toml())
    assert ("other.rate", 0.5, 0.1) in found
    assert of_the_model(found, now) == [
        ("other.top", 2, 3),
        ("other.inner.one.width", 3, 4),
        ("silent.loud", 1, 2),
    ]
