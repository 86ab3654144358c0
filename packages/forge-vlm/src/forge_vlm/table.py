"""`[vlm]` and its sub-tables. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from forge_core.config import key, table

if TYPE_CHECKING:
    from forge_core.config import Config


@table
class EncoderConfig:
    """`[vlm.encoder]`: what sees."""

    name: str = key("vit", component="vlm_encoder", help="Which encoder; its options are in its own table.")
    frozen: bool = key(
        True,
        help="Keep its weights and run it in evaluation mode; the alias 'encoder' in [freeze] changes that "
        "at a later step.",
        computes=False,
    )


@table
class ConnectorConfig:
    """`[vlm.connector]`: from the encoder's tokens to those of the decoder."""

    name: str = key("mlp", component="vlm_connector", help="Which connector.")


@table
class VideoConfig:
    """`[vlm.video]`: how videos become images."""

    frames: str = key(
        "uniform",
        component="vlm_frames",
        help="Which frames are taken; its options are in its own table.",
        computes=False,
    )
    text_behind: str = key(
        "side",
        choices=("side", "time"),
        help="Where text goes on behind a video whose frames are seen together, with positions on three "
        "axes: behind its longer side, as in transformers 5, or behind its time, too, where that is longer, "
        "as in release 4 and in the paper of Qwen2-VL.",
    )


@table
class PiecesConfig:
    """`[vlm.pieces]`: text around the pieces of a picture that an encoder cuts, in which names of special
    tokens are those tokens. Pieces come row by row, and then the whole picture, as any other image."""

    before: str = key("", help="Text before each piece; {row} and {column} are its own, from 1.")
    after_row: str = key("", help="Text behind each row of pieces.")
    after_all: str = key("", help="Text behind the last row, before the whole picture.")


@table
class VlmConfig:
    """A decoder that sees: an encoder, a connector, and how their tokens meet those of the text."""

    computes: ClassVar[bool] = True
    fusion: str = key("joint", component="vlm_fusion", help="How visual tokens meet text.")
    max_images: int = key(
        1,
        gt=0,
        unit="images",
        help="Most images of a sequence, each piece of a picture that is cut being one; those beyond are a "
        "problem of the data.",
        computes=False,
    )
    before_image: str = key(
        "", help="Text before every image, in which names of special tokens are those tokens.", computes=False
    )
    after_image: str = key("", help="Text behind every image, as before_image.", computes=False)
    pieces: PiecesConfig = key(factory=PiecesConfig, help="Between the pieces of a picture.", computes=False)
    image_token_id: int | None = key(
        None,
        ge=0,
        help="Id that stands for an image in folders of Hugging Face, which text must not have: an import "
        "sets it, and an export without takes a free one.",
        computes=False,
    )
    video_token_id: int | None = key(
        None,
        ge=0,
        help="Id that stands for a video in folders of Hugging Face, as image_token_id for an image.",
        computes=False,
    )
    max_patches: int | None = key(
        None,
        gt=0,
        unit="patches",
        help="Most patches of a sequence, those of all its images and videos together, with an encoder that "
        "sees images in sizes of their own.",
        derived="max_images times the most patches of an image",
        computes=False,
    )
    encoder: EncoderConfig = key(factory=EncoderConfig, help="What sees.")
    connector: ConnectorConfig = key(factory=ConnectorConfig, help="Between encoder and decoder.")
    video: VideoConfig = key(factory=VideoConfig, help="How videos become images.")
    answer_tokens: int = key(
        0,
        ge=0,
        unit="tokens",
        help="Let the model answer the samples of each evaluation in at most so many tokens and compare with "
        "what they say: eval/exact_match and others of metrics; 0 does not.",
        computes=False,
    )
    metrics: list[str] = key(
        factory=list,
        component="vlm_metric",
        help="What else each evaluation measures, by name; those that compare answers need answer_tokens.",
        computes=False,
    )
    shown_samples: int = key(
        4,
        gt=0,
        unit="images",
        help="Questions, pictures and answers printed where eval.sample asks for it.",
        computes=False,
    )

    def computed(self, config: Config) -> dict[str, Any]:
        """By dotted path, what the model computes with."""
        from forge_vlm.architectures.faithful import part_values

        parts = {
            f"{path}.{name}": value
            for path in ("vlm", "vlm.encoder", "vlm.connector")
            for name, value in part_values(path, config).items()
        }
        return {**parts, "vlm.video.text_behind": self.video.text_behind}
