"""What evaluations may ask of a sample beside its tokens. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from forge_core.errors import DataError


@attrs.frozen(kw_only=True)
class Asked:
    """What is known of the question of a sample.

    Attributes:
        answers: all that people gave, in any number; empty where there is only the one that is learnt.
        choices: ids of each answer to choose from, their ends included; empty without a choice.
        right: number of the right one.
    """

    answers: tuple[str, ...] = ()
    choices: tuple[tuple[int, ...], ...] = ()
    right: int = -1


def with_answer(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with the one `answer` that is learnt: of several `answers` the commonest (the first of
    those), of `choices` the one whose number stands there.

    Raises:
        DataError: answers or choices are no lists of texts, or the answer is none of the choices; choices of
            a conversation, of which nobody knows which answer they are for.
    """
    found = dict(record)
    answers, choices = texts_of(record, "answers"), texts_of(record, "choices")
    if choices and any(record.get(key) is not None for key in ("messages", "conversations")):
        raise DataError("choices are answers to a prompt, and it has messages", "give it prompt and answer")
    if answers and record.get("answer") is None:
        found["answer"] = Counter(answers).most_common(1)[0][0]
    answer = found.get("answer")
    if choices and isinstance(answer, int) and not isinstance(answer, bool):
        if not 0 <= answer < len(choices):
            raise DataError(f"the answer is choice {answer}, and there are {len(choices)}, from 0")
        found["answer"] = choices[answer]
    elif choices and answer not in choices:
        raise DataError(f"the answer {answer!r} is none of the choices {', '.join(choices)}")
    return found


def asked_of(record: Mapping[str, Any], ids_of: Callable[[str], tuple[int, ...]]) -> Asked | None:
    """What the record of a sample says for evaluations; None: nothing.

    Args:
        record: of `with_answer`.
        ids_of: an answer -> the ids that would be learnt of it.

    Raises:
        DataError: see `with_answer`; fewer than two choices.
    """
    answers, choices = texts_of(record, "answers"), texts_of(record, "choices")
    if not answers and not choices:
        return None
    if len(choices) == 1:
        raise DataError("one choice is none: choices needs two or more texts")
    return Asked(
        answers=answers,
        choices=tuple(ids_of(choice) for choice in choices),
        right=choices.index(record["answer"]) if choices else -1,
    )


def texts_of(record: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of texts, empty where it is not there.

    Raises:
        DataError: it is something else.
    """
    found = record.get(key)
    if found is None:
        return ()
    if not isinstance(found, list | tuple) or not all(isinstance(text, str) for text in found):
        raise DataError(f"{key} is no list of texts")
    return tuple(found)
