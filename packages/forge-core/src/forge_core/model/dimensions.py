"""Widths and counts of a decoder, complete. Imports no torch."""

from __future__ import annotations

from typing import Any

import attrs

from forge_core.config.tables import ModelConfig
from forge_core.errors import ForgeError

_DERIVED = ("n_kv_heads", "head_dim", "vocab_size", "ffn_hidden_dim", "gated_mlp", "max_seq_len")


@attrs.frozen(kw_only=True)
class Dimensions:
    """The keys of `[model]` that shape matrices, after resolution: none is None."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    ffn_hidden_dim: int
    gated_mlp: bool
    max_seq_len: int

    @classmethod
    def of(cls, model: ModelConfig) -> Dimensions:
        """Read them off a resolved table.

        Raises:
            ForgeError: the table is not resolved; names every key that is missing.
        """
        missing = [name for name in _DERIVED if getattr(model, name) is None]
        if missing:
            raise ForgeError(
                f"[model] is not resolved: {', '.join(missing)} unknown",
                "load it with its configuration, or give these keys",
            )
        values: dict[str, Any] = {field.name: getattr(model, field.name) for field in attrs.fields(cls)}
        return cls(**values)


def slides(model: ModelConfig, index: int) -> bool:
    """Whether attention of layer `index` is limited to `sliding_window`; `layer_types` repeats."""
    if model.sliding_window is None or index < 0:
        return False
    return not model.layer_types or model.layer_types[index % len(model.layer_types)] == "sliding"
