"""Floating-point operations of a decoder, counted from its shape. Imports no torch."""

from __future__ import annotations

from forge_core.config.tables import ModelConfig
from forge_core.model.dimensions import Dimensions, slides


def matrix_parameters_per_token(model: ModelConfig) -> int:
    """Weights of the matrices that multiply every token.

    The look-up in the embedding multiplies nothing and does not count; the head does, also when it shares the
    embedding's weight. Norms and biases are left out.
    """
    d = Dimensions.of(model)
    attention = d.dim * d.head_dim * (2 * d.n_heads + 2 * d.n_kv_heads)
    mlp = (3 if d.gated_mlp else 2) * d.dim * d.ffn_hidden_dim
    return d.n_layers * (attention + mlp) + d.dim * d.vocab_size


def flops_per_token(model: ModelConfig, seq_len: int, causal: bool = True) -> float:
    """FLOPs of one token in a sequence of `seq_len`, forward and backward, a multiply-add as two.

    Six per matrix weight (two forward, four backward) and 12 * layers * heads * head width * seq_len for
    scores and their weighted sum (Chowdhery et al. 2022, PaLM, appendix B), of which the causal rule needs
    half. Layers with a window of w need w (2 - w / seq_len) in place of seq_len: the early tokens see less
    than a window. Recomputed activations do not count: this is the work of the model, not of the machine.
    """
    d = Dimensions.of(model)
    attention = 12.0 * d.n_heads * d.head_dim * sum(_keys(model, i, seq_len) for i in range(d.n_layers))
    return 6 * matrix_parameters_per_token(model) + (attention / 2 if causal else attention)


def _keys(model: ModelConfig, index: int, seq_len: int) -> float:
    """Twice the keys that an average query of layer `index` sees."""
    window = model.sliding_window
    if window is None or window >= seq_len or not slides(model, index):
        return seq_len
    return window * (2 - window / seq_len)
