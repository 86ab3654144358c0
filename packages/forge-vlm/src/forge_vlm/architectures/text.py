"""The text model inside a family that sees: one of the core's dense families, under a prefix of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from forge_core.config import Config
from forge_core.config.tables import ModelConfig
from forge_core.contract import TensorRule, UnsuitedError
from forge_core.errors import ForgeError
from forge_core.model.architectures import ARCHITECTURES as DENSE
from forge_core.model.architectures import decoder_rules

HF = Mapping[str, Any]
DECODER = "decoder."
"""What comes before the names of a decoder's parameters inside a model that sees."""

_LLAMA = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_GEMMA = {"vocab_size": 256000, "max_position_embeddings": 8192, "head_dim": 256}
_QWEN = {**_LLAMA, "vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": {
        **_LLAMA,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN,
    "gemma": {
        **_GEMMA,
        "hidden_size": 3072,
        "intermediate_size": 24576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
    },
    "gemma2": {
        **_GEMMA,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
}
"""What a nested configuration leaves out, by `model_type`: the defaults of the family's own class."""


def read_text(config: HF, *, default: str = "llama", tied: bool | None = None) -> dict[str, Any]:
    """Keys of `[model]` from the nested `text_config`.

    Args:
        config: theirs, the whole.
        default: the `model_type` where it says none.
        tied: whether head and embedding share a weight; None: as `text_config` or its family says.

    Raises:
        ForgeError: a text family that is not offered, or what it refuses.
    """
    text = dict(config.get("text_config") or {})
    name = text.get("model_type", default)
    if name not in DENSE:
        raise ForgeError(f"a text model of type {name!r} is not offered", f"one of {', '.join(DENSE)} is")
    filled = {**DEFAULTS.get(name, {}), **{key: value for key, value in text.items() if value is not None}}
    # a key that is null on purpose: no window, no cap
    filled |= {key: None for key, value in text.items() if value is None and key in DEFAULTS.get(name, {})}
    if tied is not None:
        filled["tie_word_embeddings"] = tied
    found: dict[str, Any] = DENSE[name].read(filled)["model"]
    return found


def write_text(config: Config, families: Sequence[str] = tuple(DENSE)) -> dict[str, Any]:
    """The nested `text_config` of the first of `families` that has words for the decoder.

    Raises:
        UnsuitedError: none has; says why the nearest does not.
    """
    reasons = []
    for name in families:
        try:
            keys = DENSE[name].write(config)
        except UnsuitedError as error:
            reasons.append(error.message)
            continue
        return {"model_type": name, "architectures": [DENSE[name].class_name], **keys}
    raise UnsuitedError(min(reasons, key=lambda reason: reason.count(",")))


def text_rules(config: Config, places: Sequence[tuple[str, str]]) -> list[TensorRule]:
    """Rules of the decoder's tensors.

    Args:
        config: resolved.
        places: for each layout of their files what comes before the names of the text model, with its dot,
            and the name of the head; the first is the one that is written.
    """
    model = config[ModelConfig]
    return [
        rule
        for theirs, head in places
        for rule in decoder_rules(model, theirs=theirs, ours=DECODER, head=head)
    ]
