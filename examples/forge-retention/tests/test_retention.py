"""Retention against its recurrent form, packed documents, generation, and what every plugin has to hold."""

from __future__ import annotations

import pytest
import torch
from forge_retention.mixer import Retention

from forge_core.contract import LayerContext
from forge_core.model import Attention
from forge_core.model.generate import generate
from forge_core.plugins import Plugins
from forge_core.testing import PluginConformance, run_tiny, tiny_config, tiny_model


class TestConformance(PluginConformance):
    plugin = "retention"
    config = {"retention": {"layers": "even", "smoothness": 0.1}}


def mixer(dim: int = 8, heads: int = 2) -> Retention:
    torch.manual_seed(0)
    made = Retention(dim, heads, dim // heads, index=0).double()
    made.forge_reset(None)
    return made


def recurrent(part: Retention, x: torch.Tensor) -> torch.Tensor:
    """Token by token: S = gamma S + k v, y = q S."""
    outputs = []
    state = torch.zeros(part.heads, part.head_dim, part.head_dim, dtype=x.dtype)
    for token in x:
        q, k, v = (p(token).view(part.heads, 1, -1) for p in (part.q_proj, part.k_proj, part.v_proj))
        k = k * part.head_dim**-0.5
        state = part.gamma[:, None, None] * state + k.transpose(-1, -2) @ v
        y = torch.nn.functional.rms_norm(q @ state, (part.head_dim,)).reshape(-1)
        outputs.append(part.o_proj(torch.nn.functional.silu(part.gate_proj(token)) * y))
    return torch.stack(outputs)


def test_the_parallel_form_equals_the_recurrent_one() -> None:
    part = mixer()
    x = torch.randn(7, 8, dtype=torch.float64)
    torch.testing.assert_close(part(x[None], LayerContext())[0], recurrent(part, x))


def test_documents_of_a_sequence_are_apart() -> None:
    part = mixer()
    x = torch.randn(1, 7, 8, dtype=torch.float64)
    together = part(x, LayerContext(documents=torch.tensor([[0, 0, 0, 1, 1, 1, 1]])))
    torch.testing.assert_close(together[:, :3], part(x[:, :3], LayerContext()))
    torch.testing.assert_close(together[:, 3:], part(x[:, 3:], LayerContext()))


def test_a_state_gives_what_the_whole_text_gives() -> None:
    part = mixer()
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    cache = [part.new_cache(2, 9)]
    pieces = [part(x[:, a:b], LayerContext(cache=cache)) for a, b in ((0, 4), (4, 5), (5, 9))]
    torch.testing.assert_close(torch.cat(pieces, 1), part(x, LayerContext()))


def test_generation_with_the_state_equals_generation_without() -> None:
    plugins = Plugins()
    model = tiny_model(tiny_config(plugins=plugins, retention=True), plugins)
    assert all(isinstance(block.attn, Retention) for block in model.layers.values())
    prompts = [[1, 2, 3, 4], [5, 6]]
    made = generate(model, prompts, max_new_tokens=5, temperature=0.0)
    for prompt, new in zip(prompts, made, strict=True):
        tokens = list(prompt)
        for _ in range(5):
            tokens.append(int(model.logits(model(torch.tensor([tokens])))[0, -1].argmax()))
        assert tokens[len(prompt) :] == new


@pytest.mark.parametrize(("layers", "expected"), [("even", [True, False]), ("odd", [False, True])])
def test_some_layers_keep_attention(layers: str, expected: list[bool]) -> None:
    plugins = Plugins()
    model = tiny_model(tiny_config(plugins=plugins, retention={"layers": layers}), plugins)
    assert [isinstance(block.attn, Retention) for block in model.layers.values()] == expected
    assert [isinstance(block.attn, Attention) for block in model.layers.values()] != expected


def test_smoothness_joins_the_objective_and_accumulation_does_not_change_it() -> None:
    plugins = Plugins()
    retention = {"smoothness": 0.5}
    sizes = [{"batch_size": 4}, {"batch_size": 2, "grad_accum_steps": 2}]
    runs = [
        run_tiny(tiny_config(plugins=plugins, retention=retention, train=size), plugins) for size in sizes
    ]
    assert runs[0].objectives[0] > runs[0].losses[0]
    assert runs[0].objectives == pytest.approx(runs[1].objectives, rel=1e-5)
