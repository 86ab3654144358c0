"""A model as a Hugging Face folder, one tensor in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from forge_ckpt.errors import CheckpointError
from forge_ckpt.hf.architectures import choose
from forge_ckpt.hf.folders import CONFIG_JSON, dtype_named, merged, read_json
from forge_ckpt.hf.opening import Opened, tied_heads
from forge_ckpt.hf.tokenizers import (
    check_ids,
    copy_files,
    end_token_id,
    is_bytes,
    lacking,
    write_byte_tokenizer,
    write_tokenizer,
)
from forge_ckpt.hf.weights import Converted
from forge_ckpt.hf.whole import completed, folded
from forge_ckpt.hf.writing import new_folder, parse_size, write_json, write_weights
from forge_core.config.tables import ModelConfig
from forge_core.contract.architecture import InputToken
from forge_core.plugins import Plugins

GENERATION = "generation_config.json"


@attrs.frozen
class Written:
    """What an export or import wrote: `model_type`, tensors, their bytes, tokenizer files, things to know."""

    model_type: str
    tensors: int
    bytes: int
    tokenizer: tuple[str, ...]
    notices: tuple[str, ...] = ()


def export_hf(
    opened: Opened,
    out: Path,
    *,
    model_type: str | None = None,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    told: Callable[[str], None] | None = None,
    plugins: Plugins | None = None,
) -> Written:
    """Write a model so that `transformers` loads it with `from_pretrained`. The folder appears as a whole.

    Args:
        opened: see `open_model`.
        out: folder that does not exist yet.
        model_type: architecture; None takes the first that has words for the model.
        dtype: of the tensors (bf16, fp16, fp32); None: as they are saved.
        max_shard_size: of a file.
        told: called with the name of each file that is done.
        plugins: whose architectures there are; None: all that are installed.

    Raises:
        CheckpointError: no architecture fits, tensors are left over, or the folder cannot be written.
    """
    opened = folded(completed(opened))
    most, cast = parse_size(max_shard_size), None if dtype is None else dtype_named(dtype)
    name, architecture, keys = choose(opened.config, opened.weights.names(), model_type, plugins)
    weights = Converted(opened.weights, architecture.rules(opened.config), theirs=False)
    tokens = (*architecture.tokens(keys), *architecture.marks(opened.config))
    if _writes_bytes(opened):
        check_ids(opened.config, tokens)
    beside = {file: keys.pop(file) for file in architecture.beside if file in keys}
    tied = tied_heads(opened)
    if missing := weights.missing():
        raise CheckpointError(f"{opened.where} does not convert to {name}: it lacks {', '.join(missing[:8])}")
    names = [n for n in weights.names() if tied.isdisjoint(weights.units.by_theirs[n].ours)]
    kinds = {cast or weights.info(n).dtype for n in names}
    with new_folder(out) as folder:
        size = write_weights(weights, names, folder, dtype=cast, max_shard_size=most, told=told)
        files, notices = _tokenizer(opened, folder, tokens)
        for file, content in beside.items():
            write_json(folder / file, _laid_over(opened, file, content))
        ids = _token_ids(opened, folder)
        stated = str(kinds.pop() if len(kinds) == 1 else torch.float32).removeprefix("torch.")
        head = {"architectures": [architecture.class_name], "model_type": name}
        config = {**head, **keys, **ids, "dtype": stated, "torch_dtype": stated}
        write_json(folder / CONFIG_JSON, config)
        if GENERATION not in files:
            write_json(folder / GENERATION, {"_from_model_config": True, **ids})
    return Written(name, len(names), size, tuple(files), tuple(notices))


def _laid_over(opened: Opened, file: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
    """A file about inputs with all that the one beside the tokenizer says besides; a folder that was only
    imported keeps its own words."""
    source = None if opened.tokenizer is None else opened.tokenizer / file
    if source is None or not source.is_file():
        return content
    theirs = read_json(source)
    return merged(content, theirs) if opened.kind == "imported" else merged(theirs, content)


def _writes_bytes(opened: Opened) -> bool:
    return opened.tokenizer is None and is_bytes(opened.config) and opened.kind == "checkpoint"


def _tokenizer(opened: Opened, folder: Path, tokens: Sequence[InputToken]) -> tuple[list[str], list[str]]:
    """Files of the tokenizer, and what is to be said about it."""
    if opened.tokenizer is not None:
        return copy_files(opened.tokenizer, folder), lacking(opened.tokenizer, tokens)
    if opened.tokenizer_file is not None:
        return write_tokenizer(opened.tokenizer_file, folder, opened.config), lacking(folder, tokens)
    if _writes_bytes(opened):
        files = write_byte_tokenizer(folder, opened.config[ModelConfig].max_seq_len, tokens)
        text = (
            "the byte tokenizer was written as byte-level BPE without merges: a token a byte, 256 ends a text"
        )
        return files, [
            text,
            *(f"{token.id} is the token {token.text} ({token.key})" for token in tokens if token.text),
        ]
    return [], ["there is no tokenizer beside the model, and none was written"]


def _token_ids(opened: Opened, folder: Path) -> Mapping[str, Any]:
    """Ids of the first, last and padding token, None where unknown: families have defaults of their own."""
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if (folder / GENERATION).is_file():
        given = read_json(folder / GENERATION)
        ids |= {name: given.get(name) for name in ids}
    if ids["eos_token_id"] is None and (opened.tokenizer is not None or opened.kind == "checkpoint"):
        ids["eos_token_id"] = end_token_id(opened.config)
    size = opened.config[ModelConfig].vocab_size or 0
    return {name: _within(value, size) for name, value in ids.items()}


def _within(value: Any, size: int) -> Any:
    """An id, or a list of them, inside the vocabulary."""
    if isinstance(value, list):
        return [v for v in value if v < size] or None
    return value if value is not None and value < size else None
