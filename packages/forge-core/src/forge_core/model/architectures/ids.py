"""Ids of a vocabulary that stand for no text. Imports no torch."""

from __future__ import annotations

import json

from forge_core.config.config import Config
from forge_core.config.tables import DataConfig, ModelConfig
from forge_core.data.tokenizer import BYTES, ByteTokenizer
from forge_core.files import user_path

UNUSED_BYTES = (255, 254, 253, 252, 251, 250, 249, 248, 247, 246, 245, 193, 192)
"""Bytes that text in UTF-8 never has (RFC 3629, section 1)."""


def is_free_byte_id(token: int) -> bool:
    """Whether no text has this id where bytes are tokens, its end included."""
    return token in UNUSED_BYTES or token >= ByteTokenizer.vocab_size


def free_ids(config: Config) -> tuple[int, ...]:
    """Ids of the vocabulary that no text has, the best first; empty unless tokens are bytes.

    Args:
        config: resolved.
    """
    if config[DataConfig].tokenizer != BYTES:
        return ()
    size = config[ModelConfig].vocab_size or 0
    beyond = range(ByteTokenizer.vocab_size, size)
    return (*beyond, *(byte for byte in UNUSED_BYTES if byte < size))


def special_id(config: Config, text: str) -> int | None:
    """Id of a special token of the tokenizer's file, None: it has none of this text, or cannot be read."""
    path = user_path(config[DataConfig].tokenizer)
    try:
        content = json.loads((path / "tokenizer.json" if path.is_dir() else path).read_bytes())
        added = {token["content"]: int(token["id"]) for token in content["added_tokens"]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return added.get(text)
