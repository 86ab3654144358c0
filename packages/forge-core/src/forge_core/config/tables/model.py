"""`[model]`: the decoder of the dense text family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar

from forge_core.config.fields import evolve, key, table
from forge_core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from forge_core.config.config import Config


@table
class RopeScalingConfig:
    """Stretching of rotary positions beyond the trained length."""

    type: str = key(
        "none", choices=("none", "linear", "llama3", "yarn"), help="Which rule stretches positions."
    )
    factor: float = key(1.0, ge=1, help="How many times longer than original_max_seq_len.")
    original_max_seq_len: int = key(
        8192, gt=0, unit="tokens", help="Length the frequencies were trained for."
    )
    low_freq_factor: float = key(
        1.0, gt=0, help="llama3: wavelengths beyond length/low are divided by factor."
    )
    high_freq_factor: float = key(4.0, gt=0, help="llama3: wavelengths below length/high are left alone.")
    beta_fast: float = key(32.0, gt=0, help="yarn: rotations above which a frequency is left alone.")
    beta_slow: float = key(1.0, gt=0, help="yarn: rotations below which a frequency is fully stretched.")
    truncate: bool = key(True, help="yarn: round the ends of the ramp to whole dimensions.")
    attention_factor: float | None = key(
        None, gt=0, help="yarn: multiplies cos and sin.", derived="0.1 ln(factor) + 1"
    )


@table
class ModelConfig:
    """The decoder: transformer with rotary positions and grouped queries, by default as Llama has it."""

    computes: ClassVar[bool] = True
    dim: int = key(512, gt=0, help="Width of the residual stream.")
    n_layers: int = key(8, gt=0, help="Number of blocks.")
    n_heads: int = key(8, gt=0, help="Query heads.")
    n_kv_heads: int | None = key(None, gt=0, help="Key/value heads (GQA).", derived="n_heads")
    head_dim: int | None = key(None, gt=0, help="Width of a head.", derived="dim / n_heads")
    vocab_size: int | None = key(None, gt=0, help="Rows of the embedding.", derived="the tokenizer's size")
    ffn_hidden_dim: int | None = key(
        None, gt=0, help="Width of the MLP.", derived="256 * ceil(int(8/3 * dim * ffn_dim_multiplier) / 256)"
    )
    ffn_dim_multiplier: float = key(1.0, gt=0, help="Scales the derived width of the MLP.", computes=False)
    activation: str = key(
        "silu", choices=("silu", "gelu", "gelu_tanh", "relu"), help="Non-linearity of the MLP."
    )
    gated_mlp: bool | None = key(
        None, help="Three matrices (SwiGLU) instead of two.", derived="true for silu, false otherwise"
    )
    norm_type: str = key("rmsnorm", choices=("rmsnorm", "layernorm"), help="Kind of norm.")
    norm_eps: float = key(1e-5, gt=0, help="Epsilon of the norms.")
    norm_unit_offset: bool = key(False, help="Norms multiply by 1 + weight, and weights start at 0 (Gemma).")
    block_norm: str = key(
        "pre",
        choices=("pre", "post", "sandwich"),
        help="Norms of a block: before attention and MLP, after them and before the sum (OLMo 2), or both.",
    )
    qk_norm: bool = key(False, help="RMSNorm on queries and keys before rotation.")
    qk_norm_over: str = key(
        "head",
        choices=("head", "all_heads"),
        help="One norm a head, or one over all heads together (OLMo 2).",
    )
    attention_scale: float | None = key(
        None, gt=0, help="Factor of the attention scores.", derived="1 / sqrt(head_dim)"
    )
    attention_softcap: float | None = key(
        None, gt=0, help="Scores become cap * tanh(scores / cap) (Gemma 2); slower, no fused kernel."
    )
    logit_softcap: float | None = key(
        None, gt=0, help="Logits become cap * tanh(logits / cap), in the loss too (Gemma 2)."
    )
    sliding_window: int | None = key(
        None, gt=0, unit="tokens", help="Tokens that a token sees in a sliding layer, itself included."
    )
    layer_types: list[str] = key(
        factory=list,
        choices=("full", "sliding"),
        help="Attention of the layers, repeated over them; left out, all slide where a window is set.",
    )
    embedding_scale: float = key(1.0, gt=0, help="Factor of the token embeddings (Gemma: sqrt(dim)).")
    attention_bias: bool = key(False, help="Biases on the query, key and value projections.")
    output_bias: bool = key(False, help="Bias on the output projection of attention.")
    mlp_bias: bool = key(False, help="Biases in the MLP.")
    tie_embeddings: bool = key(False, help="The head shares the embedding's weight.")
    rope_theta: float = key(10_000.0, gt=0, help="Base of the rotary frequencies.")
    rope_theta_sliding: float | None = key(
        None,
        gt=0,
        help="Base of the rotary frequencies in sliding layers, which are then not stretched (Gemma 3); "
        "left out, they rotate like the others.",
    )
    rope_scaling: RopeScalingConfig = key(factory=RopeScalingConfig, help="Stretching of rotary positions.")
    rope_sections: list[int] = key(
        factory=list,
        gt=0,
        help="Pairs of a head that rotate by each axis of positions with several axes, in turn (time, height "
        "and width of Qwen2-VL); together head_dim / 2. Left out, there is one axis.",
    )
    max_seq_len: int | None = key(
        None,
        gt=0,
        unit="tokens",
        help="Longest sequence of training and generation.",
        derived="train.seq_len",
        computes=False,
    )
    attention: str = key(
        "auto",
        choices=("auto", "mask", "documents", "flex", "varlen"),
        help="How packed documents are kept apart: mask, document by document, flex or varlen (CUDA).",
        computes=False,
    )
    dropout: float = key(0.0, ge=0, lt=1, help="Dropout on the output of attention and MLP.", computes=False)
    init_std: float = key(
        0.02,
        gt=0,
        help="Standard deviation of new matrices; outputs divide by sqrt(2 n_layers).",
        computes=False,
    )
    init_from: str | None = key(
        None, help="Folder of weights to start from (needs a plugin that reads it).", computes=False
    )

    def resolve(self, config: Config) -> ModelConfig:
        changes: dict[str, Any] = {}
        if self.n_kv_heads is None:
            changes["n_kv_heads"] = self.n_heads
        if self.head_dim is None:
            changes["head_dim"] = max(1, self.dim // self.n_heads)
        if self.ffn_hidden_dim is None:
            try:
                width = int(4 * self.dim * (2 / 3) * self.ffn_dim_multiplier)
            except OverflowError:
                message = "cannot follow from a dim and an ffn_dim_multiplier as large as these"
                raise ConfigError([Problem("model.ffn_hidden_dim", message)]) from None
            changes["ffn_hidden_dim"] = 256 * -(-width // 256)
        if self.gated_mlp is None:
            changes["gated_mlp"] = self.activation == "silu"
        if self.max_seq_len is None:
            changes["max_seq_len"] = config.get("train").seq_len
        if self.vocab_size is None:
            from forge_core.data.tokenizer import vocab_size_of

            changes["vocab_size"] = vocab_size_of(config.get("data").tokenizer)
        return evolve(self, **changes)

    def problems(self) -> Iterator[Problem]:
        if self.head_dim is None and self.dim % self.n_heads:
            yield Problem(
                "dim", f"{self.dim} is not divisible by n_heads = {self.n_heads}", "or set head_dim"
            )
        if self.n_kv_heads is not None and self.n_heads % self.n_kv_heads:
            yield Problem("n_kv_heads", f"{self.n_kv_heads} does not divide n_heads = {self.n_heads}")
        head_dim = self.head_dim if self.head_dim is not None else self.dim // self.n_heads
        if head_dim % 2:
            yield Problem("head_dim", f"rotary positions need an even head width, not {head_dim}")
        if self.rope_sections and sum(self.rope_sections) != head_dim // 2:
            message = f"{self.rope_sections} are not the {head_dim // 2} pairs of a head"
            yield Problem("rope_sections", message, "their sum has to be head_dim / 2")
        yield from _sliding_problems(self)
        if self.qk_norm_over != "head" and not self.qk_norm:
            yield Problem("qk_norm_over", "there is no norm of queries and keys", "set qk_norm = true")
        if self.attention_softcap is not None and self.attention == "varlen":
            yield Problem("attention", "the varlen kernel cannot cap scores", 'use "auto", "mask" or "flex"')


def _sliding_problems(model: ModelConfig) -> Iterator[Problem]:
    """What does not go together in windows and the layers they apply to."""
    types, window = model.layer_types, model.sliding_window
    if len(types) > model.n_layers:
        yield Problem("layer_types", f"names {len(types)} layers of n_layers = {model.n_layers}")
    if "sliding" in types and window is None:
        yield Problem("layer_types", "sliding layers need a window", "set sliding_window")
    slides = window is not None and "sliding" in (types or ["sliding"])
    if window is not None and not slides:
        yield Problem("sliding_window", "no layer slides", "put sliding into layer_types, or leave both out")
    if model.rope_theta_sliding is not None and not slides:
        yield Problem("rope_theta_sliding", "no layer slides", "set sliding_window")
