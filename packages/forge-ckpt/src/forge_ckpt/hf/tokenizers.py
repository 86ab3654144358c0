"""The files of a tokenizer beside a model. Imports no torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forge_core.config.config import Config
from forge_core.data.tokenizer import BYTES, ByteTokenizer, load_tokenizer
from forge_core.errors import ForgeError

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
END = "<|endoftext|>"


def copy_files(source: Path, target: Path, more: Sequence[str] = ()) -> list[str]:
    """Copy the files of a tokenizer that are there, and `more`; their names."""
    found = [name for name in (*FILES, *more) if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, target / name)
    return found


def end_token_id(config: Config) -> int | None:
    """Id of the token that ends a document, None if the tokenizer cannot be read here."""
    table = config.get("data")
    try:
        return load_tokenizer(table.tokenizer, table.eos_token).eos_id
    except ForgeError:
        return None


def write_byte_tokenizer(target: Path, longest: int | None) -> list[str]:
    """The byte tokenizer as Hugging Face can run it: byte-level BPE without merges, each byte its own number.

    The ids are the same, except that the text of the end token itself is read as that token there.
    """
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end: dict[str, Any] = {"id": ByteTokenizer.eos_id, "content": END, "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocabulary,
            "merges": [],
        },
    }
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "model_max_length": longest or 1 << 30,
        "clean_up_tokenization_spaces": False,
    }
    files = {"tokenizer.json": content, "tokenizer_config.json": about}
    for name, value in files.items():
        (target / name).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return list(files)


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2; Radford et al. 2019)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]


def is_bytes(config: Config) -> bool:
    """Whether a configuration takes bytes for tokens."""
    return bool(config.get("data").tokenizer == BYTES)
