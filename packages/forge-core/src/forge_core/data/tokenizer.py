"""Text to token ids and back: bytes, or a Hugging Face `tokenizer.json`.

Importing this module imports neither torch, numpy nor the `tokenizers` package: the vocabulary's size is
needed while the configuration is read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from forge_core.errors import ConfigError, ForgeError, Problem
from forge_core.files import user_path

if TYPE_CHECKING:
    from numpy.typing import NDArray

BYTES = "bytes"
END_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "[EOS]",
    "<|im_end|>",
    "[SEP]",
)
"""Tokens taken as the end of a document when nothing says which it is; the first that exists wins."""

_PATH = "data.tokenizer"
_CHUNK = 256


class Tokenizer(Protocol):
    """What the core needs of a tokenizer.

    Attributes:
        name: "bytes" or the path of the file.
        vocab_size: largest id + 1.
        eos_id: id that ends a document.
    """

    name: str
    vocab_size: int
    eos_id: int

    def encode(self, text: str) -> list[int]:
        """Ids of `text`, nothing added."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; never fails, what is not text becomes U+FFFD."""
        ...

    def encode_documents(self, documents: Iterable[bytes]) -> Iterator[NDArray[Any]]:
        """Ids of each document followed by `eos_id`, (n,) uint16 or uint32, in the order given."""
        ...


class ByteTokenizer:
    """A token a byte: ids 0..255 are the bytes of UTF-8, 256 ends a document. Any file is valid text."""

    name = BYTES
    vocab_size = 257
    eos_id = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="surrogateescape"))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of `ids`; the end of a document and ids beyond the vocabulary are left out."""
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode("utf-8", errors="replace")

    def encode_documents(self, documents: Iterable[bytes]) -> Iterator[NDArray[Any]]:
        import numpy as np

        for document in documents:
            ids = np.empty(len(document) + 1, dtype=np.uint16)
            ids[:-1] = np.frombuffer(document, dtype=np.uint8)
            ids[-1] = self.eos_id
            yield ids


class HFTokenizer:
    """A `tokenizer.json` of Hugging Face, run by the `tokenizers` package.

    The end of a document is, in this order: `eos_token`; the `eos_token` of a `tokenizer_config.json` in the
        same folder; the first of `END_TOKENS` that the vocabulary has.

    Args:
        path: the file, or a folder that holds a `tokenizer.json`.
        eos_token: the token that ends a document.

    Raises:
        ConfigError: no such file, not a tokenizer, or no end token. ForgeError: `tokenizers` is not
            installed.
    """

    def __init__(self, path: str | Path, eos_token: str | None = None) -> None:
        self.name = str(path)
        file = _file_of(self.name)
        self.vocab_size = _size_of(load_json(file), file)
        self._file = file
        self._plain: Any = None
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError as error:
            raise ForgeError(f"{file} needs the package 'tokenizers'", "pip install tokenizers") from error
        try:
            self._backend: Any = Backend.from_file(str(file))
        except Exception as error:  # the package raises bare Exception
            raise _refuse(f"{file} is not a tokenizer: {error}") from error
        self.eos_id = self._find_end(file, eos_token)

    def _find_end(self, file: Path, eos_token: str | None) -> int:
        named = eos_token or _configured_end(file.with_name("tokenizer_config.json"))
        for token in (named,) if named else END_TOKENS:
            found = self._backend.token_to_id(token)
            if found is not None:
                return int(found)
        raise ConfigError(
            [
                Problem(
                    "data.eos_token",
                    f"{file} has no token {named!r}"
                    if named
                    else f"{file} names no token that ends a document",
                    "set it to a token of the vocabulary; tried without: " + " ".join(END_TOKENS),
                )
            ]
        )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` in which the names of special tokens are text like any other."""
        if self._plain is None:
            self._plain = type(self._backend).from_file(str(self._file))
            self._plain.encode_special_tokens = True
        ids: list[int] = self._plain.encode(text, add_special_tokens=False).ids
        return ids

    @property
    def fingerprint(self) -> str:
        """Hash of the file, and the id that ends a document."""
        return f"{hashlib.blake2b(self._file.read_bytes(), digest_size=16).hexdigest()}/{self.eos_id}"

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self._backend.decode([int(i) for i in ids], skip_special_tokens=False)
        return text

    def encode_documents(self, documents: Iterable[bytes]) -> Iterator[NDArray[Any]]:
        import numpy as np

        dtype = np.uint16 if self.vocab_size <= 1 << 16 else np.uint32
        texts = (document.decode("utf-8", errors="replace") for document in documents)
        while chunk := list(islice(texts, _CHUNK)):
            for encoding in self._backend.encode_batch(chunk, add_special_tokens=False):
                yield np.array([*encoding.ids, self.eos_id], dtype=dtype)


def fingerprint_of(tokenizer: Tokenizer) -> str:
    """Equal for tokenizers that give the same ids, as far as they tell: their `fingerprint` where they have
    one, else name, size and end."""
    default = f"{tokenizer.name}/{tokenizer.vocab_size}/{tokenizer.eos_id}"
    return str(getattr(tokenizer, "fingerprint", default))


def encode_plain(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of text that somebody wrote: no name of a special token in it becomes that token, where the
    tokenizer can tell them apart (`encode_plain`)."""
    plain: Callable[[str], list[int]] = getattr(tokenizer, "encode_plain", tokenizer.encode)
    return plain(text)


def load_tokenizer(name: str, eos_token: str | None = None) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names: "bytes", or the path of a `tokenizer.json` or its folder."""
    return ByteTokenizer() if name == BYTES else HFTokenizer(name, eos_token)


def vocab_size_of(name: str) -> int:
    """Largest id + 1 of the tokenizer `name`, without the `tokenizers` package.

    Raises:
        ConfigError: the file is missing, cannot be read or is not a tokenizer.
    """
    if name == BYTES:
        return ByteTokenizer.vocab_size
    file = _file_of(name)
    return _size_of(load_json(file), file)


def _refuse(message: str, hint: str = "'bytes', or the path of a tokenizer.json") -> ConfigError:
    return ConfigError([Problem(_PATH, message, hint)])


def _file_of(name: str) -> Path:
    path = user_path(name)
    try:
        file = path / "tokenizer.json" if path.is_dir() else path
        found = file.is_file()
    except OSError as error:
        raise _refuse(f"cannot read {path}: {error.strerror}") from error
    if not found:
        raise _refuse(
            f"there is no file {file}", "'bytes', or the path of a tokenizer.json; nothing is downloaded"
        )
    return file


def load_json(file: Path) -> Any:
    """The content of a file of a tokenizer.

    Raises:
        ConfigError: it cannot be read or is not JSON.
    """
    try:
        return json.loads(file.read_bytes())
    except OSError as error:
        raise _refuse(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _refuse(f"{file} is not JSON: {error}") from error


def _size_of(content: Any, file: Path) -> int:
    """Largest id + 1 over the model's vocabulary (a table of ids, or unigram's list) and the added tokens."""
    model = content.get("model") if isinstance(content, Mapping) else None
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    try:
        if isinstance(vocabulary, Mapping):
            largest = max((int(i) for i in vocabulary.values()), default=-1)
        elif isinstance(vocabulary, Sequence) and not isinstance(vocabulary, str):
            largest = len(vocabulary) - 1
        else:
            raise TypeError("no vocabulary")
        added = [int(token["id"]) for token in content.get("added_tokens") or ()]
    except (TypeError, ValueError, KeyError) as error:
        raise _refuse(f"{file} is not a tokenizer.json: it holds no vocabulary") from error
    size = max([largest, *added]) + 1
    if size < 1:
        raise _refuse(f"{file} has an empty vocabulary")
    return size


def _configured_end(file: Path) -> str | None:
    """`eos_token` of a `tokenizer_config.json`: a string, or a table with `content`. None without one."""
    if not file.is_file():
        return None
    content = load_json(file)
    token = content.get("eos_token") if isinstance(content, Mapping) else None
    token = token.get("content") if isinstance(token, Mapping) else token
    return token if isinstance(token, str) and token else None
