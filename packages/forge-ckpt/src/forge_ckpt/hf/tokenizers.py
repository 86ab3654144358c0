"""The files of a tokenizer beside a model. Imports no torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from forge_ckpt.errors import RequestError
from forge_core.config.config import Config
from forge_core.config.tables import ModelConfig
from forge_core.contract.architecture import InputToken
from forge_core.data.tokenizer import BYTES, ByteTokenizer, load_tokenizer
from forge_core.errors import ForgeError
from forge_core.model.architectures import free_ids, is_free_byte_id
from forge_core.model.architectures.ids import UNUSED_BYTES

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
    found = [name for name in dict.fromkeys((*FILES, *more)) if (source / name).is_file()]
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


def write_byte_tokenizer(target: Path, longest: int | None, tokens: Sequence[InputToken] = ()) -> list[str]:
    """The byte tokenizer as Hugging Face can run it: byte-level BPE without merges, each byte its own number.

    The ids are the same, except that the texts of special tokens are read as these tokens there.

    Args:
        target: folder. longest: most tokens that the model takes.
        tokens: special tokens beside the end, with ids that `check_ids` lets through; each takes the place of
            the byte that has its number.
    """
    special = {END: ByteTokenizer.eos_id, **{token.text: token.id for token in tokens if token.text}}
    taken = set(special.values())
    vocabulary = {c: byte for byte, c in enumerate(_byte_characters()) if byte not in taken}
    # in the vocabulary, too: a token that is only added gets the next id, whatever the file says
    vocabulary |= special
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    by_id = sorted((token, text) for text, token in special.items())
    added = [{"id": token, "content": text, "special": True, **plain} for token, text in by_id]
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
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
        **{token.role: token.text for token in tokens if token.role},
        "model_max_length": longest or 1 << 30,
        "clean_up_tokenization_spaces": False,
    }
    files = {"tokenizer.json": content, "tokenizer_config.json": about}
    for name, value in files.items():
        (target / name).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return list(files)


def write_tokenizer(source: Path, target: Path, config: Config) -> list[str]:
    """A tokenizer that is one file, under the name that transformers looks for; names of what was written."""
    shutil.copyfile(source, target / "tokenizer.json")
    end = end_token_id(config)
    added = json.loads(source.read_bytes()).get("added_tokens") or []
    texts = [token["content"] for token in added if token["id"] == end]
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **({"eos_token": texts[0]} if texts else {}),
        "model_max_length": config[ModelConfig].max_seq_len or 1 << 30,
        "clean_up_tokenization_spaces": False,
    }
    text = json.dumps(about, indent=1, ensure_ascii=False)
    (target / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
    return ["tokenizer.json", "tokenizer_config.json"]


def check_ids(config: Config, tokens: Sequence[InputToken]) -> None:
    """Whether ids of special tokens are none that text has, where bytes are tokens.

    Raises:
        RequestError: one is; says which are free.
    """
    size = config[ModelConfig].vocab_size or 0
    names = {token.id: token for token in reversed(tokens) if token.text}
    for token in tokens:
        if token.text and names[token.id] is not token:
            both = f"{token.text} ({token.key}) and {names[token.id].text} ({names[token.id].key})"
            raise RequestError(f"{both} have the same id {token.id}")
        if not token.text or is_free_byte_id(token.id):
            continue
        what = "the end of a text" if token.id == ByteTokenizer.eos_id else f"byte {token.id}"
        beyond = f"and {ByteTokenizer.vocab_size} to {size - 1}" if size > ByteTokenizer.vocab_size else ""
        unused = ", ".join(map(str, sorted(UNUSED_BYTES)))
        raise RequestError(
            f"{token.key} = {token.id} cannot be the token {token.text}: text has that id, it is {what}",
            f"free are {unused} (bytes that UTF-8 never has) {beyond}".rstrip()
            + f"; give one with --{token.key}={(free_ids(config) or UNUSED_BYTES)[0]}; "
            f"a larger model.vocab_size has room beyond {ByteTokenizer.vocab_size - 1}",
        )


def lacking(folder: Path, tokens: Sequence[InputToken]) -> list[str]:
    """Lines about special tokens that the tokenizer of a folder lacks or has under other ids."""
    found: dict[str, int] = {}
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads((folder / "tokenizer.json").read_bytes())
        found = {token["content"]: token["id"] for token in content["added_tokens"]}
    return [
        f"the tokenizer that was copied has no special token {token.text}"
        + (f" with the id {token.id}" if token.id >= 0 else "")
        + f" ({token.key}), so that their processors do not find it"
        for token in tokens
        if token.text and found.get(token.text, -2) != token.id
    ]


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2; Radford et al. 2019)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(b) if b in printable else chr(256 + others.index(b)) for b in range(256)]


def is_bytes(config: Config) -> bool:
    """Whether a configuration takes bytes for tokens."""
    return bool(config.get("data").tokenizer == BYTES)
