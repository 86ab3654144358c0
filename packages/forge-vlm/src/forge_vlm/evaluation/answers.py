"""Metrics of what the model answers."""

from __future__ import annotations

import re
from collections.abc import Sequence

from forge_vlm.evaluation.metric import Seen, VlmMetric
from forge_vlm.evaluation.options import RelaxedAccuracyOptions

ENOUGH = 3
"""People that have to give an answer for it to count as right."""
NUMBERS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
ARTICLES = frozenset(("a", "an", "the"))
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})")
_MARKS = re.compile(r"[^\w\s.]|\.(?!\d)")


class ExactMatch(VlmMetric):
    """The share of answers that are token for token the right one, their end included."""

    asks = True

    def measure(self, seen: Seen) -> Sequence[float]:
        pairs = [(said, right) for said, right in zip(seen.answers, seen.right, strict=True) if right]
        return float(sum(said == right for said, right in pairs)), float(len(pairs))


class VqaAccuracy(VlmMetric):
    """How far people agree with the answers, as the challenge of VQA counts it (Antol et al. 2015).

    Samples with `answers` are graded by all of them, others by the one that they have.
    """

    asks = True

    def measure(self, seen: Seen) -> Sequence[float]:
        total = count = 0.0
        for said, right, facts in zip(seen.answers, seen.right, seen.facts, strict=True):
            if right:
                people = () if facts is None else facts.answers
                total += vqa_accuracy(seen.text(said), people or (seen.text(right),))
                count += 1
        return total, count


class RelaxedAccuracy(VlmMetric):
    """The share of answers that are right, numbers within `tolerance` of the right one (ChartQA; Masry et al.
    2022, after Methani et al. 2020); one of several `answers` is enough."""

    asks = True
    options: RelaxedAccuracyOptions

    def measure(self, seen: Seen) -> Sequence[float]:
        total = count = 0.0
        for said, right, facts in zip(seen.answers, seen.right, seen.facts, strict=True):
            if right:
                people = (() if facts is None else facts.answers) or (seen.text(right),)
                text, tolerance = seen.text(said), self.options.tolerance
                total += any(relaxed_match(text, answer, tolerance) for answer in people)
                count += 1
        return total, count


def vqa_accuracy(said: str, answers: Sequence[str]) -> float:
    """The mean over all subsets that leave one answer out of min(matches / 3, 1); of one answer, a match.

    Both sides are compared as `plain` has them. Of 10 answers of which 2 match it is 0.6.
    """
    matches = [plain(said) == plain(answer) for answer in answers]
    if len(matches) == 1:
        return float(matches[0])
    total = sum(matches)
    return sum(min((total - match) / ENOUGH, 1.0) for match in matches) / len(matches)


def plain(text: str) -> str:
    """Lower case without punctuation, articles and spare blanks; numbers up to ten as digits."""
    text = _THOUSANDS.sub("", text.lower().replace("'", ""))
    words = _MARKS.sub(" ", text).split()
    kept = [word for word in words if word not in ARTICLES]
    return " ".join(str(NUMBERS.index(word)) if word in NUMBERS else word for word in kept)


def relaxed_match(said: str, answer: str, tolerance: float) -> bool:
    """Whether an answer is right: a number within `tolerance` of it; else the same letters in any case."""
    found, right = number_of(said), number_of(answer)
    if found is None or right is None:
        return said.strip().lower() == answer.strip().lower()
    return abs(found - right) <= tolerance * abs(right)


def number_of(text: str) -> float | None:
    """A number, of which a percent sign makes hundredths; None if it is none."""
    text = text.strip().replace(",", "")
    try:
        return float(text[:-1]) / 100 if text.endswith("%") else float(text)
    except ValueError:
        return None
