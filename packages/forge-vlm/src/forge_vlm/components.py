"""Encoders, connectors, fusions and data sources by name.

Category "vlm_encoder": `target(options) -> nn.Module`, (N, 3, H, W) normalised pixels -> (N, T, D); its
options have `geometry()`. Category "vlm_connector": `target(ConnectorSpec, options) -> nn.Module`,
(N, T, D_in) -> (N, T', D_out); its options have `tokens(grid)`. Category "vlm_fusion":
`target(session, options) -> Fusion`. Category "vlm_frames":
`target(options) -> Sampler`, see `forge_vlm.data.frames`. Category "vlm_metric":
`target(session, options) -> VlmMetric`.
"""

from __future__ import annotations

from forge_core.contract import Component

_TABLES = {"data_source": "data.options", "vlm_frames": "data.options", "vlm_metric": "evaluation.options"}
"""Where the options of a category are, if not in `forge_vlm.options`."""


def _parts(category: str, module: str, *rows: tuple[str, str, str | None, str]) -> tuple[Component, ...]:
    """Name, target inside of `module`, class of options and help of each; options may name their module."""

    tables = _TABLES.get(category, "options")

    def made(name: str, target: str, table: str | None, help: str) -> Component:
        if table is not None:
            table = f"forge_vlm.{table}" if ":" in table else f"forge_vlm.{tables}:{table}"
        target = f"forge_vlm.{module}{target}"
        return Component(category=category, name=name, target=target, options=table, help=help)

    return tuple(made(*row) for row in rows)


ENCODERS = _parts(
    "vlm_encoder",
    "encoders.",
    ("vit", "vit:VisionTransformer", "VitOptions", "A small vision transformer of our own."),
    ("clip", "hf:clip", "ClipOptions", "CLIP's vision tower; needs transformers."),
    ("siglip", "hf:siglip", "SiglipOptions", "SigLIP's vision tower; needs transformers."),
    ("idefics3", "hf:idefics3", "Idefics3Options", "Idefics 3's vision tower; needs transformers."),
    (
        "patches",
        "patches:PatchTransformer",
        "options_packed:PatchesOptions",
        "Images in sizes of their own, as patches (Qwen2-VL, Qwen2.5-VL).",
    ),
    (
        "tiles",
        "tiles:TileTransformer",
        "options_tiled:TilesOptions",
        "Images as tiles, all of which see each other (Llama 3.2 Vision).",
    ),
)
CONNECTORS = _parts(
    "vlm_connector",
    "",
    ("linear", "connectors:LinearConnector", "LinearOptions", "One matrix."),
    ("mlp", "connectors:MlpConnector", "MlpOptions", "Two matrices with a GELU between them."),
    ("average_pool", "connectors:AveragePool", "AveragePoolOptions", "The mean of each window of tokens."),
    (
        "attentional_pool",
        "connectors:AttentionalPool",
        "AttentionalPoolOptions",
        "Attention in each window.",
    ),
    ("pixel_shuffle", "connectors:PixelShuffle", "PixelShuffleOptions", "Neighbours side by side."),
    (
        "patch_merger",
        "encoders.patches:PatchMerger",
        "options_packed:MergerOptions",
        "Squares of neighbouring patches in one token (Qwen2-VL).",
    ),
)
FUSIONS = _parts(
    "vlm_fusion",
    "fusions.",
    ("joint", "joint:JointFusion", "JointOptions", "Visual tokens in the sequence, one decoder."),
    (
        "cross_attention",
        "cross_attention:CrossAttentionFusion",
        "CrossAttentionOptions",
        "Blocks in which text asks visual tokens.",
    ),
    (
        "gated_cross_attention",
        "gated_cross:GatedCrossFusion",
        "options_tiled:GatedCrossOptions",
        "Blocks in place of the decoder's own in which text asks visual tokens (Llama 3.2 Vision).",
    ),
    ("mot", "mot:MotFusion", "MotOptions", "A transformer a modality, one attention over both."),
    ("moma", "moma:MomaFusion", "MomaOptions", "Experts a modality, those of [moe]."),
)
METRICS = _parts(
    "vlm_metric",
    "evaluation.",
    ("exact_match", "answers:ExactMatch", None, "Answers that are token for token the right one."),
    ("vqa_accuracy", "answers:VqaAccuracy", None, "How far people agree with the answers (VQA)."),
    (
        "relaxed_accuracy",
        "answers:RelaxedAccuracy",
        "RelaxedAccuracyOptions",
        "Right answers, numbers within a tolerance (ChartQA).",
    ),
    ("caption_loss", "captions:CaptionLoss", None, "Loss and perplexity of samples with an image."),
    (
        "multiple_choice",
        "choices:MultipleChoice",
        "MultipleChoiceOptions",
        "Questions whose right choice is the likeliest.",
    ),
)
SOURCES = _parts(
    "data_source",
    "data.",
    (
        "images",
        "folder:build",
        "ImagesOptions",
        "A JSONL file of conversations or captions, and the images that it names.",
    ),
    (
        "hf",
        "hf:build",
        "HfImagesOptions",
        "Hugging Face data sets with columns of images; by number, or read as a stream.",
    ),
    (
        "webdataset",
        "webdataset:build",
        "WebDatasetOptions",
        "Tar shards of images or videos with text, read by offset.",
    ),
    ("webvid", "webvid:build", "WebVidOptions", "CSV files of captions, and the videos that they name."),
    (
        "digits",
        "digits:build",
        "DigitsOptions",
        "Questions about the handwritten digits that scikit-learn brings.",
    ),
)
FRAMES = _parts(
    "vlm_frames",
    "data.",
    (
        "uniform",
        "frames:uniform",
        "UniformOptions",
        "Equal distances in time, the first and the last frame among them.",
    ),
    (
        "stretches",
        "frames:stretches",
        "StretchesOptions",
        "The first frame of each of equal stretches (Qwen2-VL).",
    ),
)
COMPONENTS = (*ENCODERS, *CONNECTORS, *FUSIONS, *METRICS, *SOURCES, *FRAMES)
