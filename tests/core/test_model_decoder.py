"""The whole decoder against plain loops, its names, its parts and its splits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from modelkit import PlainDecoder, config, decoder, tokens
from torch import Tensor, nn

from forge_core.config.tables import ModelConfig
from forge_core.contract import LayerContext, LayerInfo, SplitSpec
from forge_core.errors import ForgeError
from forge_core.model import Decoder, build_decoder, default_parts

VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "mha": {"n_kv_heads": 4},
    "mqa": {"n_kv_heads": 1},
    "wide heads": {"head_dim": 12},
    "qk_norm": {"qk_norm": True},
    "qkv biases": {"attention_bias": True},
    "all biases": {"attention_bias": True, "output_bias": True, "mlp_bias": True},
    "two matrices": {"gated_mlp": False, "activation": "gelu"},
    "two matrices, biases": {"gated_mlp": False, "activation": "relu", "mlp_bias": True},
    "gated gelu_tanh": {"activation": "gelu_tanh"},
    "tied": {"tie_embeddings": True},
    "layernorm": {"norm_type": "layernorm"},
    "eps and theta": {"norm_eps": 0.1, "rope_theta": 50.0},
    "everything": {
        "n_kv_heads": 1,
        "qk_norm": True,
        "attention_bias": True,
        "output_bias": True,
        "mlp_bias": True,
        "tie_embeddings": True,
        "norm_type": "layernorm",
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_a_decoder_of_plain_loops(variant: str) -> None:
    model = config(**VARIANTS[variant])
    built = decoder(model, torch.float64)
    plain = PlainDecoder(model, built.state_dict())
    batch = tokens(2, 9)
    logits = built.logits(built(batch))
    assert logits.shape == (2, 9, 13)
    for row in range(2):
        torch.testing.assert_close(logits[row], plain.logits(batch[row]), rtol=1e-10, atol=1e-10)


def test_the_comparison_sees_each_variant() -> None:
    """Each variant changes the plain decoder too, or comparing with it would prove nothing."""
    batch = tokens(1, 9)[0]
    model = config(qk_norm=True, attention_bias=True, output_bias=True, mlp_bias=True)
    weights = decoder(model).state_dict()
    first = PlainDecoder(model, weights).logits(batch)
    for name in weights:
        changed = {**weights, name: weights[name] + 0.1}
        assert (PlainDecoder(model, changed).logits(batch) - first).abs().max() > 1e-4, name


def test_gradients_equal_those_of_plain_loops() -> None:
    model = config(qk_norm=True, attention_bias=True)
    built = decoder(model, torch.float64)
    batch = tokens(1, 7)
    weights = {name: p.detach().clone().requires_grad_() for name, p in built.named_parameters()}
    plain = PlainDecoder(model, {})
    plain.weights = weights
    target = torch.randn(7, 13, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    (built.logits(built(batch))[0] * target).sum().backward()
    (plain.logits(batch[0]) * target).sum().backward()
    for name, parameter in built.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-9, atol=1e-10, msg=name)


def test_parameters_have_the_canonical_names() -> None:
    names = set(dict(decoder(config(qk_norm=True, n_layers=1)).named_parameters()))
    assert names == {
        "embed.weight",
        "layers.0.attn_norm.weight",
        "layers.0.attn.q_proj.weight",
        "layers.0.attn.k_proj.weight",
        "layers.0.attn.v_proj.weight",
        "layers.0.attn.o_proj.weight",
        "layers.0.attn.q_norm.weight",
        "layers.0.attn.k_norm.weight",
        "layers.0.mlp_norm.weight",
        "layers.0.mlp.gate_proj.weight",
        "layers.0.mlp.up_proj.weight",
        "layers.0.mlp.down_proj.weight",
        "norm.weight",
        "head.weight",
    }
    assert not list(decoder().buffers())


@pytest.mark.parametrize(
    ("key", "owners"),
    [
        ("attention_bias", {"attn.q_proj", "attn.k_proj", "attn.v_proj"}),
        ("output_bias", {"attn.o_proj"}),
        ("mlp_bias", {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}),
    ],
)
def test_each_bias_has_its_key(key: str, owners: set[str]) -> None:
    names = dict(decoder(config(n_layers=1, **{key: True})).named_parameters())
    assert {name for name in names if name.endswith("bias")} == {f"layers.0.{owner}.bias" for owner in owners}


def test_a_shape_of_seven_billion_on_meta() -> None:
    model = config(
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=32,
        head_dim=128,
        vocab_size=32000,
        ffn_hidden_dim=11008,
        max_seq_len=4096,
    )
    with torch.device("meta"):
        built = build_decoder(model, default_parts(model))
    count = sum(p.numel() for p in built.parameters())
    by_hand = 32 * (4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096) + 2 * 32000 * 4096 + 4096
    assert count == by_hand
    assert count == pytest.approx(6.7e9, rel=0.01)
    # shapes can be worked out without memory
    with torch.device("meta"):
        hidden = built(torch.zeros(2, 8, dtype=torch.int64))
    assert hidden.shape == (2, 8, 4096)
    assert hidden.is_meta


def test_tied_head_is_the_embedding() -> None:
    built = decoder(config(tie_embeddings=True))
    assert built.head is not None
    assert built.embed is not None
    assert built.head.weight is built.embed.weight
    assert "head.weight" not in dict(built.named_parameters())
    assert built.split().tied == (("embed.weight", "head.weight"),)


def test_embeds_replace_tokens() -> None:
    built = decoder()
    batch = tokens(2, 5)
    assert built.embed is not None
    assert torch.equal(built(embeds=built.embed(batch)), built(batch))
    with pytest.raises(ForgeError, match="either tokens or embeds"):
        built(batch, embeds=built.embed(batch))
    with pytest.raises(ForgeError, match="either tokens or embeds"):
        built()


def test_too_long_a_sequence_is_refused() -> None:
    with pytest.raises(ForgeError, match=r"33 tokens are more than model\.max_seq_len = 32"):
        decoder()(tokens(1, 33))


def test_an_unresolved_table_is_refused() -> None:
    model = ModelConfig(dim=16, n_layers=1, n_heads=2)
    with pytest.raises(ForgeError, match="n_kv_heads, head_dim, vocab_size, ffn_hidden_dim"):
        build_decoder(model, default_parts(config()))
    with pytest.raises(ForgeError, match="not resolved"):
        default_parts(model)


def test_parts_after_a_split_add_up_to_the_whole() -> None:
    built = decoder(config(n_layers=3))
    batch = tokens(2, 6)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2, dtype=torch.int32)
    spec = built.split()
    assert spec == SplitSpec(
        entry=("embed",), blocks="layers", exit=("norm", "head"), needs=("documents", "positions")
    )
    first, last = decoder(config(n_layers=3)), decoder(config(n_layers=3))
    first.norm = first.head = None
    del first.layers["1"], first.layers["2"]
    last.embed = None
    del last.layers["0"]
    assert set(dict(last.named_parameters())) < set(dict(built.named_parameters()))
    travels = first(batch, documents=documents)
    hidden = last(embeds=travels, documents=documents)
    assert torch.equal(last.logits(hidden), built.logits(built(batch, documents=documents)))
    with pytest.raises(ForgeError, match="no embedding"):
        last(batch)
    with pytest.raises(ForgeError, match="no head"):
        first.logits(travels)


class Inserted(nn.Module):
    """Adds what the family passes, times a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(1, 1, bias=False)

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        y: Tensor = x + self.scale.weight[0, 0] * context.extras["toy"]
        return y


class ToyParts:
    """Default parts, but an FFN of zeros in layer 1 and two blocks inserted after it."""

    def __init__(self, model: ModelConfig) -> None:
        self.default = default_parts(model, ffn=self.ffn)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.default, name)

    def ffn(self, layer: LayerInfo) -> nn.Module:
        class Zero(nn.Module):
            def forward(self, x: Tensor, context: LayerContext) -> Tensor:
                return torch.zeros_like(x)

        return Zero() if layer.index == 1 else self.default.ffn(layer)

    def blocks_after(self, layer: LayerInfo) -> Sequence[nn.Module]:
        return (Inserted(), Inserted()) if layer.index == 1 else ()


def test_parts_can_come_from_elsewhere_and_inserted_blocks_have_stable_names() -> None:
    model = config(n_layers=3)
    built = build_decoder(model, ToyParts(model))
    assert list(built.layers) == ["0", "1", "1_after0", "1_after1", "2"]
    assert "layers.1_after1.scale.weight" in dict(built.named_parameters())
    assert not [name for name, _ in built.named_parameters() if name.startswith("layers.1.mlp.")]
    assert [type(entry).__name__ for entry in built.new_cache(1, 4)] == ["KVCache"] * 3
    with torch.no_grad():
        for name in ("1_after0", "1_after1"):
            built.layers[name].scale.weight.fill_(0.5)  # type: ignore[union-attr]
    batch = tokens(1, 4)
    ran: list[Tensor] = []
    built.layers["1"].register_forward_hook(lambda _m, _a, out: ran.append(out))
    built.layers["2"].register_forward_pre_hook(lambda _m, args: ran.append(args[0]))
    built(batch, extras={"toy": 3.0})
    torch.testing.assert_close(ran[1], ran[0] + 3.0)


def test_dropout_acts_in_training_only_on_both_branches() -> None:
    model = config(dropout=0.5, n_layers=1)
    built = decoder(model)
    batch = tokens(2, 6)
    same = decoder(config(n_layers=1))
    built.eval()
    assert torch.equal(built(batch), same(batch))
    built.train()
    torch.manual_seed(0)
    first = built(batch)
    assert not torch.equal(first, built(batch))
    torch.manual_seed(0)
    assert torch.equal(first, built(batch))
    block = built.layers["0"]
    with torch.no_grad():
        for name in ("attn.o_proj.weight", "mlp.down_proj.weight"):
            kept = block.get_parameter(name).clone()
            block.get_parameter(name).zero_()
            assert not torch.equal(built(batch), built(batch)), "the other branch drops too"
            block.get_parameter(name).copy_(kept)


def test_bf16_autocast_stays_close_and_keeps_weights_fp32() -> None:
    built = decoder(config(qk_norm=True))
    batch = tokens(2, 8)
    exact = built.logits(built(batch))
    with torch.autocast("cpu", torch.bfloat16):
        hidden = built(batch)
        loss = built.logits(hidden).float().square().mean()
        close = built.logits(hidden).float()
    loss.backward()
    assert hidden.dtype == torch.float32, "the residual stream stays in fp32"
    assert (close - exact).abs().max() < 0.05 * exact.abs().max()
    assert not torch.equal(close, exact)
    for name, parameter in built.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_bf16_weights_run_and_stay_close() -> None:
    built = decoder(config(qk_norm=True))
    batch = tokens(2, 8)
    exact = built.logits(built(batch))
    low = built.to(torch.bfloat16)
    logits = low.logits(low(batch))
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - exact).abs().max() < 0.08 * exact.abs().max()


def test_rotary_tables_survive_moves_and_casts() -> None:
    model = config()
    with torch.device("meta"):
        built = build_decoder(model, default_parts(model))
    built.to_empty(device="cpu")
    built.load_state_dict(decoder(model).state_dict())
    batch = tokens(1, 8)
    expected = decoder(model)(batch)
    assert torch.equal(built(batch), expected)
    assert torch.equal(built.double().float()(batch), expected)


class CountingTable:
    """Counts how often tables are asked for."""

    def __init__(self, built: Decoder) -> None:
        self.inner, self.asked = built.rotary, 0

    def at(self, *args: Any) -> tuple[Tensor, Tensor]:
        self.asked += 1
        return self.inner.at(*args)


def test_tables_and_masks_are_made_once_a_forward() -> None:
    built = decoder(config(n_layers=3, attention="mask"))
    table = CountingTable(built)
    built.rotary = table  # type: ignore[assignment]
    seen: list[LayerContext] = []
    for block in built.layers.values():
        block.register_forward_pre_hook(lambda _m, args: seen.append(args[1]))
    built(tokens(1, 4), documents=torch.tensor([[0, 0, 1, 1]], dtype=torch.int32))
    assert table.asked == 1
    assert len(seen) == 3
    assert all(context is seen[0] for context in seen)
    assert isinstance(seen[0].mask, Tensor)
    built(tokens(1, 4))
    assert seen[-1].mask is None, "plain causal attention needs no mask"
