"""Pieces of text and images to the tokens of one sample; what is too long is cut here, and nowhere else.

An image is whole or not there. Imports no torch.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_core.data.chat import Piece, Template, check_messages
from forge_core.data.tokenizer import Tokenizer, encode_plain
from forge_core.data.wording import counted
from forge_core.errors import DataError
from forge_vlm.marks import encode_marks

_LEARNT, _IMAGE, _JOINED = 1 << 31, 1 << 30, 1 << 29


@attrs.frozen(kw_only=True)
class Part:
    """A part of a sample: ids of text, or an image.

    Attributes:
        ids: of text. learnt: whether they are supervised.
        image: number of the image that stands here, None for text.
        joined: it stands or falls with the part before it, as an image with the marks around it.
    """

    ids: tuple[int, ...] = ()
    learnt: bool = False
    image: int | None = None
    joined: bool = False


@attrs.frozen(kw_only=True, eq=False)
class Laid:
    """A sample as n tokens.

    Attributes:
        tokens: (n,) int64 ids, the filler where an image stands. learnt: (n,) bool, which are supervised.
        index: (n,) int64, number of the visual token at a position among those of the sample, -1 for text.
        images: numbers of the images that are left. positions: where each of them starts.
        cut: something was left out at the end. dropped: images that were.
    """

    tokens: NDArray[np.int64]
    learnt: NDArray[np.bool_]
    index: NDArray[np.int64]
    images: tuple[int, ...]
    positions: tuple[int, ...]
    cut: bool = False
    dropped: int = 0


def lay_out(
    parts: Sequence[Part],
    *,
    places: int | Sequence[int],
    limit: int,
    eos_id: int,
    marker: int | None = None,
) -> Laid:
    """The first `limit` tokens of a sample.

    An image that would not fit as a whole, with what is joined to it, is left out, with all that follows. An
    answer that is cut still ends with `eos_id`, which takes the place of its last token; of one that has no
    room for a token and its end nothing is learnt.

    Args:
        places: positions that an image takes, 0 where it takes none; of each by its number, where they
            differ.
        limit: most tokens.
        eos_id: ends an answer that is cut, and fills the places of images.
        marker: token that stands behind these places where there is an image; None: there is none.
    """
    rows = _Rows(limit, eos_id, marker)
    cut = cut_answer = False
    for part, together in _joined(parts, places, len(rows.mark)):
        if together > rows.room:
            cut = True
        elif part.image is not None:
            cut = not rows.image(part.image, places if isinstance(places, int) else places[part.image])
        else:
            cut = not rows.text(part)
            cut_answer = cut and part.learnt
        if cut:
            break
    if cut_answer:
        _end(rows.tokens, rows.learnt, eos_id)
    total = sum(part.image is not None for part in parts)
    return Laid(
        tokens=np.array(rows.tokens, dtype=np.int64),
        learnt=np.array(rows.learnt, dtype=np.bool_),
        index=np.array(rows.index, dtype=np.int64),
        images=tuple(rows.images),
        positions=tuple(rows.positions),
        cut=cut,
        dropped=total - len(rows.images),
    )


class _Rows:
    """What `lay_out` has so far, at most `limit` tokens."""

    def __init__(self, limit: int, eos_id: int, marker: int | None) -> None:
        self.limit, self.filler = limit, eos_id
        self.mark = [] if marker is None else [marker]
        self.tokens: list[int] = []
        self.learnt: list[bool] = []
        self.index: list[int] = []
        self.images: list[int] = []
        self.positions: list[int] = []
        self.visual = 0

    @property
    def room(self) -> int:
        """Tokens that still fit."""
        return self.limit - len(self.tokens)

    def image(self, number: int, count: int) -> bool:
        """An image of `count` places; False: it does not fit."""
        if count + len(self.mark) > self.room:
            return False
        self.images.append(number)
        self.positions.append(len(self.tokens))
        self.index += [*range(self.visual, self.visual + count), *(-1 for _ in self.mark)]
        self.visual += count
        self.tokens += [self.filler] * count + self.mark
        self.learnt += [False] * (count + len(self.mark))
        return True

    def text(self, part: Part) -> bool:
        """As much of a text as fits; False: that is not all of it."""
        kept = part.ids[: self.room]
        self.tokens += kept
        self.learnt += [part.learnt] * len(kept)
        self.index += [-1] * len(kept)
        return len(kept) == len(part.ids)


def _joined(parts: Sequence[Part], places: int | Sequence[int], more: int) -> Iterator[tuple[Part, int]]:
    """Each part, and how many tokens have to fit: those of all that are joined to the first of several, and 0
    for the others.

    Args:
        more: tokens of an image behind its places.
    """
    group: list[Part] = []
    for part in (*parts, None):
        if part is not None and part.joined:
            group.append(part)
            continue
        sizes = (
            len(each.ids)
            if each.image is None
            else more + (places if isinstance(places, int) else places[each.image])
            for each in group
        )
        total = sum(sizes) if len(group) > 1 else 0
        yield from ((each, 0 if number else total) for number, each in enumerate(group))
        group = [] if part is None else [part]


def compacted(parts: Iterable[Part]) -> bytes:
    """Parts in four bytes an id, as there may be millions of samples."""
    found = array("I")
    for part in parts:
        joined = _JOINED if part.joined else 0
        if part.image is not None:
            found.append(_IMAGE | joined | part.image)
        else:
            found.append((_LEARNT if part.learnt else 0) | joined | len(part.ids))
            found.extend(part.ids)
    return found.tobytes()


def parts_in(content: bytes) -> list[Part]:
    """The parts again."""
    found, at, parts = array("I", content), 0, []
    while at < len(found):
        head, at = found[at], at + 1
        count, joined = head & (_JOINED - 1), bool(head & _JOINED)
        if head & _IMAGE:
            parts.append(Part(image=count, joined=joined))
        else:
            ids = tuple(found[at : at + count])
            parts.append(Part(ids=ids, learnt=bool(head & _LEARNT), joined=joined))
            at += count
    return parts


def _end(tokens: list[int], learnt: list[bool], eos_id: int) -> None:
    """Let an answer that was cut end, if at least one of its tokens is left beside the end."""
    run = 0
    while run < len(learnt) and learnt[-1 - run]:
        run += 1
    if run > 1:
        tokens[-1] = eos_id
    elif run == 1:
        learnt[-1] = False


def pieces_of(record: dict[str, object], template: Template | None) -> list[Piece]:
    """What a record says, in pieces that are tokenised one by one.

    Raises:
        DataError: neither messages nor an answer.
    """
    messages = record.get("messages")
    prompt, answer = record.get("prompt", ""), record.get("answer")
    if messages is None:
        if not isinstance(answer, str) or not isinstance(prompt, str):
            raise DataError("neither messages nor the text of an answer", _say_what_is_missing(record))
        if template is None:
            return [
                Piece(text=prompt, written=True),
                Piece(text=answer, learnt=True, written=True),
                Piece(end=True, learnt=True),
            ]
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    checked = check_messages(messages)
    if template is not None:
        return list(template(checked))
    pieces: list[Piece] = []
    for message in checked:
        mine = message["role"] == "assistant"
        pieces.append(Piece(text=message["content"], learnt=mine, written=True))
        if mine:
            pieces.append(Piece(end=True, learnt=True))
    return pieces


def _say_what_is_missing(record: dict[str, object]) -> str:
    """The way out for a record without a text to learn."""
    for name in ("answer", "prompt"):
        value = record.get(name)
        if value is not None and not isinstance(value, str):
            return f"{name} is to be text in quotes, not {json.dumps(value, default=str)[:40]}"
    return "give it answer or caption, with a prompt where there is one, or messages"


def parts_of(
    pieces: Iterable[Piece],
    images: int,
    tokenizer: Tokenizer,
    placeholder: str,
    around: tuple[str, str] = ("", ""),
) -> list[Part]:
    """Pieces as ids, and an image for each placeholder; without placeholders the images come first.

    Args:
        around: text before and behind every image, see `encode_marks`.

    Raises:
        DataError: placeholders and images differ in number.
    """
    before, behind = (
        [Part(ids=encode_marks(tokenizer, text), joined=bool(number))] if text else []
        for number, text in enumerate(around)
    )
    joined = bool(before)
    parts: list[Part] = []
    count = 0
    for piece in pieces:
        if piece.end:
            parts.append(Part(ids=(tokenizer.eos_id,), learnt=piece.learnt))
            continue
        for number, text in enumerate(piece.text.split(placeholder)):
            if number:
                parts += [*before, Part(image=count, joined=joined), *behind]
                count += 1
            if text:
                ids = encode_plain(tokenizer, text) if piece.written else tokenizer.encode(text)
                parts.append(Part(ids=tuple(ids), learnt=piece.learnt))
    if not count:
        shown = ((*before, Part(image=number, joined=joined), *behind) for number in range(images))
        return [*(part for each in shown for part in each), *parts]
    if count != images:
        stand = counted(count, f"placeholder {placeholder}", f"placeholders {placeholder}")
        raise DataError(f"{stand} for {counted(images, 'image')}")
    return parts
