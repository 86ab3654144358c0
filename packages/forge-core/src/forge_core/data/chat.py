"""Conversations to tokens of which only the assistant's answers are learnt.

Every piece of a conversation is tokenised on its own, so that a mask begins and ends exactly with an answer:
no token reaches over its edge. Whoever asks the trained model tokenises in the same pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import attrs

from forge_core.data.tokenizer import Tokenizer, encode_plain
from forge_core.errors import DataError

ASSISTANT = "assistant"
Message = dict[str, str]


@attrs.frozen(kw_only=True)
class Piece:
    """A part of a conversation.

    Attributes:
        text: what is tokenised. learnt: whether its tokens are supervised.
        written: somebody wrote it, so names of special tokens in it are text like any other.
        end: the id that ends a document instead of a text.
    """

    text: str = ""
    learnt: bool = False
    written: bool = False
    end: bool = False


class Template(Protocol):
    """How messages become one text."""

    def __call__(self, messages: Sequence[Message]) -> Iterator[Piece]: ...


def chatml(messages: Sequence[Message]) -> Iterator[Piece]:
    """`<|im_start|>ROLE\\nCONTENT<|im_end|>\\n`; an answer is learnt with its `<|im_end|>`."""
    for message in messages:
        learnt = message["role"] == ASSISTANT
        yield Piece(text=f"<|im_start|>{message['role']}\n")
        yield Piece(text=message["content"], learnt=learnt, written=True)
        yield Piece(text="<|im_end|>", learnt=learnt)
        yield Piece(text="\n")


def llama3(messages: Sequence[Message]) -> Iterator[Piece]:
    """`<|start_header_id|>ROLE<|end_header_id|>\\n\\nCONTENT<|eot_id|>` behind one `<|begin_of_text|>`; an
    answer is learnt with its `<|eot_id|>`."""
    yield Piece(text="<|begin_of_text|>")
    for message in messages:
        learnt = message["role"] == ASSISTANT
        yield Piece(text=f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n")
        yield Piece(text=message["content"].strip(), learnt=learnt, written=True)
        yield Piece(text="<|eot_id|>", learnt=learnt)


def plain(messages: Sequence[Message]) -> Iterator[Piece]:
    """`ROLE: CONTENT` in lines, for tokenizers without special tokens; an answer ends with the id that ends a
    document and is learnt with it."""
    for number, message in enumerate(messages):
        learnt = message["role"] == ASSISTANT
        yield Piece(text=("\n" if number else "") + f"{message['role'].capitalize()}: ")
        yield Piece(text=message["content"], learnt=learnt, written=True)
        if learnt:
            yield Piece(end=True, learnt=True)


TEMPLATES: dict[str, Template] = {"chatml": chatml, "llama3": llama3, "plain": plain}
OWN = "tokenizer"


def template_of(name: str, tokenizer: Tokenizer) -> Template:
    """The template of a name; "tokenizer" is the one that comes with the tokenizer.

    Raises:
        DataError: no such template.
    """
    if name == OWN:
        from forge_core.data.chat_template import TokenizerTemplate

        return TokenizerTemplate(tokenizer)
    if name not in TEMPLATES:
        raise DataError(f"no chat template {name!r}", f"one of {', '.join([*TEMPLATES, OWN])}")
    return TEMPLATES[name]


def encode_chat(messages: Any, template: Template, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Ids of a conversation, and which of them are learnt; both of one length.

    Raises:
        DataError: not a list of messages with role and content.
    """
    tokens: list[int] = []
    learnt: list[bool] = []
    for piece in template(check_messages(messages)):
        if piece.end:
            ids = [tokenizer.eos_id]
        elif piece.written:
            ids = encode_plain(tokenizer, piece.text)
        else:
            ids = tokenizer.encode(piece.text)
        tokens += ids
        learnt += [piece.learnt] * len(ids)
    return tokens, learnt


def check_messages(messages: Any) -> list[Message]:
    """The messages, if that is what they are.

    Raises:
        DataError: saying which message is wrong and how.
    """
    if not isinstance(messages, list) or not messages:
        raise DataError(f"a conversation is a list of messages, not {_shown(messages)}")
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise DataError(f"message {number} is no object with role and content, but {_shown(message)}")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise DataError(f"message {number}: {key} is no text, but {_shown(message.get(key))}")
    return messages


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
