"""Pieces of text and images to the tokens of one sample; what is too long is cut here, and nowhere else.

An image is whole or not there. Imports no torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

import attrs

from forge_core.data.chat import Piece, Template, check_messages
from forge_core.data.tokenizer import Tokenizer, encode_plain
from forge_core.data.wording import counted
from forge_core.errors import DataError

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


@attrs.frozen(kw_only=True)
class Laid:
    """A sample as tokens.

    Attributes:
        tokens: ids, the filler where an image stands. learnt: which are supervised.
        index: number of the visual token at a position among those of the sample, -1 for text.
        images: numbers of the images that are left. positions: where each of them starts.
        cut: something was left out at the end. dropped: images that were.
    """

    tokens: tuple[int, ...]
    learnt: tuple[bool, ...]
    index: tuple[int, ...]
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
    tokens: list[int] = []
    learnt: list[bool] = []
    index: list[int] = []
    images: list[int] = []
    positions: list[int] = []
    mark = [] if marker is None else [marker]
    visual = 0
    cut_answer = cut = False
    for part, together in _joined(parts, places, len(mark)):
        room = limit - len(tokens)
        cut = together > room
        if cut:
            break
        if part.image is not None:
            count = places if isinstance(places, int) else places[part.image]
            cut = count + len(mark) > room
            if cut:
                break
            positions.append(len(tokens))
            index += [*range(visual, visual + count), *(-1 for _ in mark)]
            visual += count
            images.append(part.image)
            tokens += [eos_id] * count + mark
            learnt += [False] * (count + len(mark))
            continue
        cut = len(part.ids) > room
        kept = part.ids[:room]
        tokens += kept
        learnt += [part.learnt] * len(kept)
        index += [-1] * len(kept)
        if cut:
            cut_answer = part.learnt
            break
    if cut_answer:
        _end(tokens, learnt, eos_id)
    total = sum(part.image is not None for part in parts)
    return Laid(
        tokens=tuple(tokens),
        learnt=tuple(learnt),
        index=tuple(index),
        images=tuple(images),
        positions=tuple(positions),
        cut=cut,
        dropped=total - len(images),
    )


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
            raise DataError("neither messages nor the text of an answer")
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


def parts_of(
    pieces: Iterable[Piece],
    images: int,
    tokenizer: Tokenizer,
    placeholder: str,
    around: tuple[str, str] = ("", ""),
) -> list[Part]:
    """Pieces as ids, and an image for each placeholder; without placeholders the images come first.

    Args:
        around: text before and behind every image, in which names of special tokens are those tokens.

    Raises:
        DataError: placeholders and images differ in number.
    """
    before, behind = (
        [Part(ids=tuple(tokenizer.encode(text)), joined=bool(number))] if text else []
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
