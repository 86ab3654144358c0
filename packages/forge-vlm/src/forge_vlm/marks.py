"""Special tokens in the text around images. Imports no torch."""

from __future__ import annotations

import re

from forge_core.data.tokenizer import BYTES, Tokenizer

FAKE, WHOLE, SAID = "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"
START, STOP = "<|vision_start|>", "<|vision_end|>"
BOS, BEGIN = "<bos>", "<|begin_of_text|>"

BYTE_MARKS = {FAKE: 192, WHOLE: 193, START: 245, STOP: 246, BOS: 247, BEGIN: 248, SAID: 249}
"""Ids of tokens that families of Hugging Face have around images, where bytes are tokens: bytes that text in
UTF-8 never has (RFC 3629, section 1)."""
_NAMES = re.compile("|".join(map(re.escape, BYTE_MARKS)))


def encode_marks(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Ids of text around images, in which names of special tokens are those tokens: with bytes as tokens
    `BYTE_MARKS`."""
    if tokenizer.name != BYTES:
        return tuple(tokenizer.encode(text))
    found: list[int] = []
    at = 0
    for name in _NAMES.finditer(text):
        found += [*tokenizer.encode(text[at : name.start()]), BYTE_MARKS[name.group()]]
        at = name.end()
    return (*found, *tokenizer.encode(text[at:]))
