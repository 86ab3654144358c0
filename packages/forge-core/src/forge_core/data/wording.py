"""Numbers with the things that they count, in messages."""

from __future__ import annotations


def counted(number: int, word: str, words: str = "") -> str:
    """`1 sample`, `1,200 samples`.

    Args:
        words: the plural, where it is not the word with an s.
    """
    return f"{number:,} {word if number == 1 else words or word + 's'}"
