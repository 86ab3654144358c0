"""`[model]`: the decoder of the dense text family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from forge_core.config.fields import evolve, key, table
from forge_core.errors import Problem

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
    """The decoder: pre-norm transformer with rotary positions and grouped queries (Llama)."""

    dim: int = key(512, gt=0, help="Width of the residual stream.")
    n_layers: int = key(8, gt=0, help="Number of blocks.")
    n_heads: int = key(8, gt=0, help="Query heads.")
    n_kv_heads: int | None = key(None, gt=0, help="Key/value heads (GQA).", derived="n_heads")
    head_dim: int | None = key(None, gt=0, help="Width of a head.", derived="dim / n_heads")
    vocab_size: int | None = key(None, gt=0, help="Rows of the embedding.", derived="the tokenizer's size")
    ffn_hidden_dim: int | None = key(
        None, gt=0, help="Width of the MLP.", derived="256 * ceil(int(8/3 * dim * ffn_dim_multiplier) / 256)"
    )
    ffn_dim_multiplier: float = key(1.0, gt=0, help="Scales the derived width of the MLP.")
    activation: str = key(
        "silu", choices=("silu", "gelu", "gelu_tanh", "relu"), help="Non-linearity of the MLP."
    )
    gated_mlp: bool | None = key(
        None, help="Three matrices (SwiGLU) instead of two.", derived="true for silu, false otherwise"
    )
    norm_type: str = key("rmsnorm", choices=("rmsnorm", "layernorm"), help="Kind of norm.")
    norm_eps: float = key(1e-5, gt=0, help="Epsilon of the norms.")
    qk_norm: bool = key(False, help="RMSNorm per head on queries and keys before rotation.")
    attention_bias: bool = key(False, help="Biases on the query, key and value projections.")
    output_bias: bool = key(False, help="Bias on the output projection of attention.")
    mlp_bias: bool = key(False, help="Biases in the MLP.")
    tie_embeddings: bool = key(False, help="The head shares the embedding's weight.")
    rope_theta: float = key(10_000.0, gt=0, help="Base of the rotary frequencies.")
    rope_scaling: RopeScalingConfig = key(factory=RopeScalingConfig, help="Stretching of rotary positions.")
    max_seq_len: int | None = key(
        None,
        gt=0,
        unit="tokens",
        help="Longest sequence of training and generation.",
        derived="train.seq_len",
    )
    attention: str = key(
        "auto",
        choices=("auto", "mask", "documents", "flex", "varlen"),
        help="How packed documents are kept apart: mask, document by document, flex or varlen (CUDA).",
    )
    dropout: float = key(0.0, ge=0, lt=1, help="Dropout on the output of attention and MLP.")
    init_std: float = key(
        0.02, gt=0, help="Standard deviation of new matrices; outputs divide by sqrt(2 n_layers)."
    )
    init_from: str | None = key(None, help="Folder of weights to start from (needs a plugin that reads it).")

    def resolve(self, config: Config) -> ModelConfig:
        changes: dict[str, Any] = {}
        if self.n_kv_heads is None:
            changes["n_kv_heads"] = self.n_heads
        if self.head_dim is None:
            changes["head_dim"] = max(1, self.dim // self.n_heads)
        if self.ffn_hidden_dim is None:
            changes["ffn_hidden_dim"] = 256 * -(-int(4 * self.dim * (2 / 3) * self.ffn_dim_multiplier) // 256)
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
