"""Options of the data sources `vlm/images` and `vlm/digits`. Imports no torch."""

from __future__ import annotations

from forge_core.config import key, table


@table
class ImagesOptions:
    """Lines of JSON beside images; `data.path` is the file, or a folder that holds `data.jsonl`.

    A line has `image` (a path), `images` (a list) or `video` (a path, whose frames are images; `<video>` in
    the text stands for all of them), and either `messages` (role and content) or `prompt` and
    `answer`, of which the prompt may be left out. Each placeholder in the text stands for the next image;
    without any, the images come first.
    """

    template: str = key(
        "none",
        choices=("none", "plain", "chatml", "llama3", "tokenizer"),
        help="How text becomes one conversation, as for the source chat; 'none' is the prompt, the answer "
        "and the end of the document.",
    )
    placeholder: str = key("<image>", help="What stands for an image in the text.")
    too_long: str = key(
        "cut",
        choices=("cut", "drop", "error"),
        help="What becomes of a sample that is longer than a sequence: its start, of which an image is "
        "either whole or not there; nothing; an error.",
    )
    unreadable: str = key(
        "error",
        choices=("error", "mask"),
        help="What becomes of a sample whose image cannot be read: an error that names it, or no image and "
        "no label (counted in data/unreadable_images).",
    )
    fps: float = key(
        2.0, gt=0, help="Frames that are taken of a second of video, at equal distances in time."
    )
    min_frames: int = key(4, ge=1, unit="frames", help="Fewest frames of a video, as far as it has them.")
    max_frames: int = key(16, ge=1, unit="frames", help="Most frames of a video.")
    pack: bool = key(False, help="Put several samples into one sequence, kept apart, as far as they fit.")


@table
class DigitsOptions:
    """Questions about 1797 handwritten digits of 8 x 8 pixels (scikit-learn)."""

    questions: list[str] = key(
        factory=lambda: ["which", "even", "larger"],
        choices=("which", "even", "larger"),
        help="What is asked of each picture: which digit it is, whether it is even, whether it is above 4.",
    )
