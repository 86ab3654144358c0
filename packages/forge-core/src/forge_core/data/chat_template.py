"""The chat template that a Hugging Face tokenizer brings, rendered in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from forge_core.data.chat import ASSISTANT, Message, Piece
from forge_core.data.tokenizer import Tokenizer, load_json
from forge_core.errors import DataError, ForgeError
from forge_core.files import user_path


class TokenizerTemplate:
    """The `chat_template` of a `tokenizer_config.json`, or a `chat_template.jinja`, beside the tokenizer.

    A conversation is rendered up to each of the assistant's turns, once asking for an answer and once with
    it. What the second text has more is the answer with what the template ends it by, and is learnt.

    Raises:
        ForgeError: jinja2 is not installed. DataError: the tokenizer has no template, or one that changes
            earlier turns when a later one comes, so that no exact mask exists.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        source, self._names = _find(tokenizer.name)
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError as error:
            raise ForgeError(
                "a tokenizer's chat template needs the package 'jinja2'", "pip install jinja2"
            ) from error
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except Exception as error:
            raise DataError(f"{tokenizer.name}: its chat template is not valid: {error}") from error

    def __call__(self, messages: Sequence[Message]) -> Iterator[Piece]:
        done = ""
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._render(messages[:number], ask=True)
            after = self._render(messages[: number + 1], ask=False)
            yield Piece(text=_more(before, done))
            yield Piece(text=_more(after, before), learnt=True)
            done = after
        rest = _more(self._render(messages, ask=False), done)
        if rest:
            yield Piece(text=rest)

    def _render(self, messages: Sequence[Message], ask: bool) -> str:
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=ask, **self._names)
        except DataError:
            raise
        except Exception as error:
            raise DataError(f"the chat template failed: {type(error).__name__}: {error}") from error


def _more(text: str, start: str) -> str:
    if not text.startswith(start):
        raise DataError(
            "the tokenizer's chat template changes earlier turns when later ones come, so that what is "
            "learnt cannot be told exactly",
            'choose another: data.chat.template = "chatml"',
        )
    return text[len(start) :]


def _refuse(message: str) -> None:
    raise DataError(f"the chat template refuses this conversation: {message}")


def _is_default(entry: Any) -> bool:
    return isinstance(entry, dict) and entry.get("name") == "default"


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot read {file}: {reason}", "make it a file of UTF-8 text") from error


def _find(name: str) -> tuple[str, dict[str, Any]]:
    """The template beside a tokenizer, and the names of special tokens that it may use."""
    path = user_path(name)
    folder = path if path.is_dir() else path.parent
    config: dict[str, Any] = {}
    if name != "bytes" and (folder / "tokenizer_config.json").is_file():
        found = load_json(folder / "tokenizer_config.json")
        config = found if isinstance(found, dict) else {}
    source = config.get("chat_template")
    if isinstance(source, list):  # several by name
        source = next((entry.get("template") for entry in source if _is_default(entry)), None)
    if name != "bytes" and (folder / "chat_template.jinja").is_file():
        source = _text_of(folder / "chat_template.jinja")
    if not isinstance(source, str):
        raise DataError(
            f"the tokenizer {name} brings no chat template",
            'choose one: data.chat.template = "chatml", "llama3" or "plain"',
        )
    tokens = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(key)
        token = token.get("content") if isinstance(token, dict) else token
        tokens[key] = token if isinstance(token, str) else ""
    return source, tokens
