"""The text of a sample, in the forms that data sets have it, to parts of a sequence. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from forge_core.data.chat import Template, template_of
from forge_core.data.source import SourceSpec
from forge_core.errors import DataError
from forge_vlm.data.asked import Asked, asked_of, with_answer
from forge_vlm.data.layout import Part, parts_of, pieces_of
from forge_vlm.data.options import SampleOptions
from forge_vlm.data.order import VIDEO, apart, in_order
from forge_vlm.geometry import around_images

SPEAKERS = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}
"""Names that conversations have for roles."""
Found = tuple[str, list[Part], tuple[Any, ...], Asked | None]
"""Name, parts and pictures of a sample, and what evaluations may ask of it."""


@attrs.frozen
class Rejected:
    """What is no sample; `name` says which and why."""

    name: str


def rejected(options: SampleOptions, error: DataError) -> Rejected:
    """What stands for a sample that is none.

    Raises:
        DataError: where that is an error.
    """
    if options.malformed == "error":
        drop = 'malformed = "drop" among the options of the source leaves such samples out'
        raise DataError(error.message, f"{error.hint}; {drop}" if error.hint else drop) from error
    return Rejected(error.message)


@attrs.frozen(kw_only=True)
class Writer:
    """Lays the text of samples and the places of their images side by side.

    Attributes:
        spec: of the source. options: of the source. template: None for the plain texts.
    """

    spec: SourceSpec
    options: SampleOptions
    template: Template | None

    @classmethod
    def of(cls, spec: SourceSpec, options: SampleOptions) -> Writer:
        """For a source.

        Raises:
            DataError: no such template.
        """
        plain = options.template == "none"
        return cls(
            spec=spec,
            options=options,
            template=None if plain else template_of(options.template, spec.tokenizer),
        )

    def found(self, name: str, record: Mapping[str, Any], pictures: tuple[Any, ...]) -> Found:
        """A sample.

        Args:
            name: in messages. record: its text, see `SampleOptions`.
            pictures: images in their order, then videos, each as its frames or as one clip.

        Raises:
            DataError: no text, messages that are none, or placeholders and images that differ in number;
                does not say of which sample.
        """
        record = with_answer(record)
        parts, ordered = self._parts(record, pictures)

        def learnt(answer: str) -> tuple[int, ...]:
            other, _ = self._parts({**record, "answer": answer}, pictures)
            return tuple(token for part in other if part.learnt for token in part.ids)

        return name, parts, ordered, asked_of(record, learnt)

    def _parts(
        self, record: Mapping[str, Any], pictures: tuple[Any, ...]
    ) -> tuple[list[Part], tuple[Any, ...]]:
        """The parts, and the pictures as they come in them."""
        placeholder = self.options.placeholder
        pieces = pieces_of(normalised(record, placeholder, self.options.question), self.template)
        _check_text("".join(each.text for each in pieces))
        texts, ordered = in_order([each.text for each in pieces], *apart(pictures), placeholder)
        pieces = [attrs.evolve(each, text=text) for each, text in zip(pieces, texts, strict=True)]
        around = around_images(self.spec.config)
        return parts_of(pieces, len(ordered), self.spec.tokenizer, placeholder, around), tuple(ordered)


def _check_text(text: str) -> None:
    """JSON can name halves of characters, which no tokenizer knows."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"its text has half a character, {text[error.start]!r}") from error


def normalised(record: Mapping[str, Any], placeholder: str, question: str = "") -> dict[str, Any]:
    """A record with `messages`, or with `prompt` and `answer`.

    Raises:
        DataError: a message of a conversation that is none.
    """
    for key in ("messages", "conversations"):
        turns = record.get(key)
        if turns is not None:
            if not isinstance(turns, list | tuple):
                raise DataError(f"{key} is {type(turns).__name__}, no list of messages")
            return {"messages": [_message(n, turn, placeholder) for n, turn in enumerate(turns)]}
    answer = record.get("answer")
    prompt = record.get("prompt")
    return {
        "prompt": question if prompt is None else prompt,
        "answer": record.get("caption") if answer is None else answer,
    }


def _message(number: int, turn: Any, placeholder: str) -> Any:
    if not isinstance(turn, Mapping):
        return turn  # the source chat says what is wrong with it
    role, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
    if isinstance(content, list):
        content = "".join(_part(number, part, placeholder) for part in content)
    return {"role": SPEAKERS.get(role, role) if isinstance(role, str) else role, "content": content}


def _part(number: int, part: Any, placeholder: str) -> str:
    """A part of the content of a message as text."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    text = part.get("text") if kind == "text" else None
    if isinstance(text, str):
        return text
    if kind in ("image", "image_url"):
        return placeholder
    if kind == "video":
        return VIDEO
    raise DataError(f"message {number}: {str(part)[:40]!r} is neither text nor an image nor a video")
