"""Auxiliary routers of experts that choose tokens: they learn the choice and change nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from forge_core.plugins import Plugins
from forge_core.testing import run_tiny, tiny_config, tiny_session
from forge_moe.routers import ExpertChoiceRouter, auxiliary_loss
from forge_moe.routing import RouterSpec, Routing
from forge_moe.table import ExpertChoiceOptions


def tables(**choice: Any) -> dict[str, Any]:
    options = {"look_ahead": True, **choice}
    moe = {"router": "expert_choice", "num_experts": 4, "top_k": 2, "expert_choice": options}
    return {
        "model": {"n_kv_heads": 2, "ffn_hidden_dim": 24},
        "moe": moe,
        "train": {"dtype": "fp64", "batch_size": 4, "grad_clip_norm": 0.0, "max_steps": 4},
        "eval": {"at_end": False},
    }


def session_tables(**choice: Any) -> tuple[Any, Plugins]:
    plugins = Plugins()
    return tiny_config(plugins=plugins, **tables(**choice)), plugins


def test_the_loss_by_hand() -> None:
    """Two tokens, two experts: expert 0 has token 0, expert 1 both; logits 0 and ln 3."""
    token, expert = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1])
    guess = torch.tensor([[0.0, torch.tensor(3.0).log()], [0.0, 0.0]])
    routing = Routing(expert, torch.ones(3), guess, guess, token)
    first = (torch.tensor(2.0).log() - torch.tensor(0.75).log()) / 2
    torch.testing.assert_close(auxiliary_loss(guess, routing, torch.tensor([True, False])), first)
    torch.testing.assert_close(auxiliary_loss(guess, routing, None), first + torch.tensor(2.0).log())


def test_outside_of_training_each_token_is_routed_by_itself() -> None:
    spec = RouterSpec(dim=8, num_experts=4, top_k=2)
    made = ExpertChoiceRouter(spec, ExpertChoiceOptions(auxiliary=True)).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    x, valid = torch.randn(6, 8, generator=generator), torch.tensor([True] * 5 + [False])
    routing = made(x, valid)
    assert routing.token is not None
    assert made.auxiliary is not None
    for number, token in enumerate(x):
        chosen = made.auxiliary(token[None])[0] > 0
        scores = (made.weight @ token).softmax(-1)
        mine = routing.token == number
        expected = torch.where(chosen & valid[number], torch.arange(4), 4)
        assert routing.expert[mine].tolist() == expected.tolist()
        torch.testing.assert_close(routing.weight[mine], scores * (chosen & valid[number]))


def test_what_they_learn_changes_nothing_else() -> None:
    config, plugins = session_tables()
    plain = run_tiny(config, plugins)
    config, plugins = session_tables(auxiliary=True)
    done = run_tiny(config, plugins)
    assert done.losses == plain.losses
    for name, weight in plain.weights.items():
        assert torch.equal(done.weights[name], weight), name
    more = set(done.weights) - set(plain.weights)
    assert {name.rpartition("auxiliary.")[2] for name in more} == {
        "up_proj.weight",
        "out_proj.weight",
        "out_proj.bias",
    }
    values = done.metric("loss/moe_auxiliary")
    assert values[-1] < values[0]


def test_a_model_in_evaluation_looks_at_no_later_token_and_at_no_other_row() -> None:
    config, plugins = session_tables(look_ahead=False, auxiliary=True)
    with tiny_session(config, plugins) as session, torch.no_grad():
        model: Any = session.model.eval()
        generator = torch.Generator().manual_seed(3)
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.2)
        tokens = torch.randint(0, 64, (2, 12), generator=generator)
        found = model(tokens)
        changed = tokens.clone()
        changed[:, 7:] = (changed[:, 7:] + 1) % 64
        torch.testing.assert_close(model(changed)[:, :7], found[:, :7], rtol=0, atol=1e-12)
        torch.testing.assert_close(model(tokens[:1]), found[:1], rtol=0, atol=1e-12)
        assert F.mse_loss(model(changed)[:, 7:], found[:, 7:]) > 0


def test_looking_ahead_has_to_be_meant() -> None:
    from forge_core.config import ConfigError

    with pytest.raises(ConfigError, match=r"auxiliary = true to generate without looking ahead"):
        session_tables(look_ahead=False)
