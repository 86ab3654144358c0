"""Blocks compile whole, all as one graph, and stay equal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from modelkit import config, decoder, tokens
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from forge_core.model import Decoder

# torch reads .grad of activations while tracing and hides its own warning; an error filter would raise it
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(built: Decoder) -> CompileCounterWithBackend:
    counter = CompileCounterWithBackend("aot_eager")
    for block in built.layers.values():
        block.compile(backend=counter, fullgraph=True)
    return counter


def documents(*lengths: int) -> Tensor:
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return row.int().expand(2, -1)


VARIANTS: list[dict[str, Any]] = [
    {},
    {"qk_norm": True, "attention_bias": True, "mlp_bias": True, "norm_type": "layernorm"},
    {"gated_mlp": False, "activation": "gelu_tanh", "tie_embeddings": True},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_all_blocks_are_one_graph_and_equal_to_eager(changes: dict[str, Any]) -> None:
    model = config(n_layers=4, **changes)
    results = []
    for compile_it in (False, True):
        built = decoder(model)
        counter = compiled(built) if compile_it else None
        out = built.logits(built(tokens(2, 10)))
        out.square().mean().backward()
        results.append((out, [p.grad for p in built.parameters()]))
        if counter is not None:
            assert counter.frame_count == 1, "four blocks of equal shape share a graph"
    torch.testing.assert_close(results[0][0], results[1][0])
    for eager, other in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(eager, other)


def test_packed_batches_do_not_recompile() -> None:
    model = config(n_layers=3, attention="auto")
    built, eager = decoder(model), decoder(model)
    counter = compiled(built)
    for lengths in ((4, 6), (1, 2, 7), (5, 5), (3, 3, 4)):
        batch = tokens(2, 10)
        found = built(batch, documents=documents(*lengths))
        torch.testing.assert_close(found, eager(batch, documents=documents(*lengths)))
    assert counter.frame_count == 1
    built(tokens(2, 10), documents=documents(10))
    assert counter.frame_count == 2, "rows of one document need no mask"


def test_dropout_and_autocast_compile() -> None:
    built = decoder(config(dropout=0.1, qk_norm=True))
    compiled(built)
    with torch.autocast("cpu", torch.bfloat16):
        hidden = built(tokens(2, 10))
    hidden.float().sum().backward()
    assert hidden.isfinite().all()


def test_generation_runs_through_compiled_blocks() -> None:
    from forge_core.model.generate import generate

    built, eager = decoder(), decoder()
    for block in built.layers.values():
        block.compile(backend="aot_eager")
    prompts = [[1, 2, 3], [4, 5, 6]]
    found = generate(built, prompts, max_new_tokens=4, temperature=0)
    assert found == generate(eager, prompts, max_new_tokens=4, temperature=0)


def test_recomputed_activations_give_the_same_gradients() -> None:
    from torch.utils.checkpoint import checkpoint

    built, plain = decoder(), decoder()
    for block in built.layers.values():
        inner = block.forward
        block.forward = lambda *args, inner=inner: checkpoint(inner, *args, use_reentrant=False)
    batch = tokens(2, 10)
    for model in (built, plain):
        model(batch, documents=documents(4, 6)).square().sum().backward()
    for (name, one), other in zip(built.named_parameters(), plain.parameters(), strict=True):
        assert one.grad is None or torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]
