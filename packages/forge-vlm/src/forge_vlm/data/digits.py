"""The source `vlm/digits`: questions about handwritten digits that scikit-learn brings. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forge_core.data.source import SourceSpec
from forge_core.data.tokenizer import encode_plain
from forge_core.errors import ForgeError
from forge_vlm.data.asked import Asked
from forge_vlm.data.build import held_out, laid_samples
from forge_vlm.data.layout import parts_of, pieces_of
from forge_vlm.data.options import DigitsOptions
from forge_vlm.data.pixels import Pixels, prepared_array
from forge_vlm.data.record import Found
from forge_vlm.data.source import ImageTextSource, SampleLayout, image_shape
from forge_vlm.data.stored import PictureCodec
from forge_vlm.geometry import around_images

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CHOICES = {"which": NAMES, "even": ("no", "yes"), "larger": ("no", "yes")}
"""Answers to each question."""
_WHITE = 16


def ask(question: str, digit: int) -> tuple[str, str]:
    """A question and its answer."""
    if question == "which":
        return "Which digit is this? ", NAMES[digit]
    if question == "even":
        return "Is it even? ", "no" if digit % 2 else "yes"
    return "Is it above four? ", "yes" if digit > 4 else "no"


def build(spec: SourceSpec, options: DigitsOptions) -> ImageTextSource:
    """Every question about every picture of one split; all questions about a picture are on one side.

    Raises:
        ForgeError: scikit-learn is not installed.
    """
    pictures, digits = load()
    shape = image_shape(spec)
    tokenizer = spec.tokenizer
    choices = {
        question: tuple((*encode_plain(tokenizer, text), tokenizer.eos_id) for text in CHOICES[question])
        for question in options.questions
    }
    found: list[Found] = []
    for number, digit in enumerate(digits):
        if spec.split != "all" and held_out(f"digit {number}", spec.holdout) != (spec.split == "holdout"):
            continue
        for question in options.questions:
            prompt, answer = ask(question, int(digit))
            pieces = pieces_of({"prompt": prompt, "answer": answer}, None)
            parts = parts_of(pieces, 1, spec.tokenizer, "<image>", around_images(spec.config))
            asked = Asked(choices=choices[question], right=CHOICES[question].index(answer))
            found.append((f"digit {number}, {question}", parts, (number,), asked))
    lay = SampleLayout(spec, shape, measure=lambda _: pictures.shape[1:])
    samples = laid_samples(found, PictureCodec(Path()), lay)

    def read(numbers: Sequence[Any]) -> list[Pixels]:
        return [prepared_array(np.repeat(pictures[n][None], 3, axis=0), shape.geometry) for n in numbers]

    return ImageTextSource(spec, shape, samples, read, about=repr(options))


def load() -> tuple[Pixels, np.ndarray[Any, Any]]:
    """Pictures (1797, 8, 8) uint8, white on black, and digits (1797,).

    Raises:
        ForgeError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ForgeError(
            "the source vlm/digits needs scikit-learn", 'pip install "forge-vlm[quickstart]"'
        ) from error
    found = load_digits()
    return np.round(found.images * (255 / _WHITE)).astype(np.uint8), found.target
