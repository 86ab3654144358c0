"""Options of the data sources `vlm/...` and of the policies that pick frames. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from forge_core.config import Problem, key, table


@table
class SampleOptions:
    """What all sources of images and text have in common.

    The text of a sample is `messages` (role and content, as of the source chat; content may be a list of
    parts), `conversations` (from and value), or `prompt` and `answer`, of which the prompt may be left out.
    Each placeholder in it stands for the next image; without any, the images come first.
    """

    template: str = key(
        "none",
        choices=("none", "plain", "chatml", "llama3", "tokenizer"),
        help="How text becomes one conversation, as for the source chat; 'none' is the prompt, the answer "
        "and the end of the document.",
    )
    placeholder: str = key("<image>", help="What stands for an image in the text.")
    question: str = key("", help="What is asked where a sample has an answer and no prompt of its own.")
    too_long: str = key(
        "cut",
        choices=("cut", "drop", "error"),
        help="What becomes of a sample that is longer than a sequence: its start, of which an image is "
        "either whole or not there; nothing; an error.",
    )
    malformed: str = key(
        "error",
        choices=("error", "drop"),
        help="What becomes of a sample that is none, as its text is not there or as it names more or fewer "
        "images than it has: an error that names it, or nothing (counted in data/samples_left_out).",
    )
    unreadable: str = key(
        "error",
        choices=("error", "mask"),
        help="What becomes of a sample whose image or video cannot be read: an error that names it, or no "
        "image and no label (counted in data/unreadable_images).",
    )
    pack: bool = key(
        False,
        help="Put several samples into one sequence, kept apart: neighbours as far as they fit, or with "
        "data.packing = 'best_fit' those that leave the least room.",
    )


@table
class ImagesOptions(SampleOptions):
    """Lines of JSON beside images; `data.path` is the file, or a folder that holds `data.jsonl`.

    A line has `image` (a path) or `images` (a list), and `video` (a path) or `videos` (a list), each of which
    is its frames, or one image to an encoder that sees them together; `<video>` in the text stands for the
    next video.
    """


@table
class HfImagesOptions(SampleOptions):
    """Hugging Face data sets with columns of images: a folder of `save_to_disk`, files, or a name of the
    hub."""

    images: list[str] = key(
        factory=list,
        help="Columns of images, or of lists of them, in the order in which they come.",
        derived="image and images, those that are there; else the only column of images",
    )
    prompt: str = key("prompt", help="Column of prompts; it may be missing.")
    answer: str = key("answer", help="Column of answers, or of captions; numbers of classes become names.")
    messages: str | None = key(
        None, help="Column of conversations.", derived="messages or conversations, if there is one"
    )
    split: str = key("train", help="Split of the data set.")
    format: str | None = key(
        None, choices=("json", "parquet"), help="How files are read.", derived="their suffix"
    )
    name: str | None = key(None, help="Configuration of a data set of the hub.", derived="its only one")
    revision: str | None = key(None, help="Commit of a data set of the hub.", derived="the newest")
    streaming: bool = key(False, help="Read the data in its own order while training.")
    shuffle_buffer: int = key(
        0,
        ge=0,
        unit="samples",
        help="Of a stream: samples among which the next is drawn; 0 keeps the order.",
    )


@table
class WebDatasetOptions(SampleOptions):
    """Tar shards of WebDataset: members whose names are equal up to the first dot of the file's name are one
    sample. `data.path` is a tar, a folder of them, or a pattern such as `shards/{000..012}.tar`.

    `.json` holds the text of a sample, `.txt` its answer alone; images come in the order in which they stand
    in the shard, and so do videos. Shards are read by offset and never unpacked.
    """

    image_suffixes: list[str] = key(
        factory=lambda: ["jpg", "jpeg", "png", "webp"], help="Suffixes of members that are images."
    )
    video_suffixes: list[str] = key(
        factory=lambda: ["mp4", "webm", "mkv", "avi", "gif"], help="Suffixes of members that are videos."
    )
    need_images: bool = key(
        True, help="Refuse a sample without an image or video, rather than read its text."
    )


@table
class WebVidOptions(SampleOptions):
    """Videos with captions as WebVid has them: CSV files with the columns videoid, page_dir and name, and
    videos at `videos/<page_dir>/<videoid>.mp4`. `data.path` is a CSV, or a folder of them."""

    videos: str = key(
        "videos/{page_dir}/{videoid}.mp4",
        help="Where the video of a row is, beside the CSV; names in braces are columns.",
    )
    caption: str = key("name", help="Column of captions.")


@table
class UniformOptions:
    """Frames at equal distances in time, the first and the last among them."""

    fps: float = key(2.0, gt=0, help="Frames that are taken of a second.")
    min_frames: int | None = key(
        None,
        ge=1,
        unit="frames",
        help="Fewest frames of a video, as far as it has them.",
        derived="4, or max_frames if that is less",
    )
    max_frames: int = key(16, ge=1, unit="frames", help="Most frames of a video.")

    def problems(self) -> Iterator[Problem]:
        if self.least > self.max_frames:
            yield Problem("min_frames", f"{self.least} is more than max_frames = {self.max_frames}")

    @property
    def least(self) -> int:
        """`min_frames`, resolved."""
        return min(4, self.max_frames) if self.min_frames is None else self.min_frames


@table
class StretchesOptions:
    """The first frame of each of equal stretches of a video, as the video processor of Qwen2-VL in
    transformers picks them."""

    fps: float = key(2.0, gt=0, help="Stretches to a second.")
    min_frames: int = key(4, ge=1, unit="frames", help="Fewest frames of a video, as far as it has them.")
    max_frames: int = key(768, ge=1, unit="frames", help="Most frames of a video.")
    multiple: int = key(
        2, ge=1, unit="frames", help="Their number is a multiple of this, of a video that has so many."
    )

    def problems(self) -> Iterator[Problem]:
        if self.min_frames > self.max_frames:
            yield Problem("min_frames", f"{self.min_frames} is more than max_frames = {self.max_frames}")

    @property
    def least(self) -> int:
        """`min_frames`, as of other policies."""
        return self.min_frames


@table
class DigitsOptions:
    """Questions about 1797 handwritten digits of 8 x 8 pixels (scikit-learn)."""

    questions: list[str] = key(
        factory=lambda: ["which", "even", "larger"],
        choices=("which", "even", "larger"),
        help="What is asked of each picture: which digit it is, whether it is even, whether it is above 4.",
    )
