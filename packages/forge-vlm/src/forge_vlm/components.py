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


def _encoder(name: str, target: str, options: str, help: str) -> Component:
    return Component(
        category="vlm_encoder",
        name=name,
        target=f"forge_vlm.encoders.{target}",
        options=f"forge_vlm.options:{options}",
        help=help,
    )


def _connector(name: str, target: str, options: str, help: str) -> Component:
    return Component(
        category="vlm_connector",
        name=name,
        target=f"forge_vlm.connectors:{target}",
        options=f"forge_vlm.options:{options}",
        help=help,
    )


def _metric(name: str, target: str, options: str | None, help: str) -> Component:
    return Component(
        category="vlm_metric",
        name=name,
        target=f"forge_vlm.evaluation.{target}",
        options=None if options is None else f"forge_vlm.evaluation.options:{options}",
        help=help,
    )


def _fusion(name: str, target: str, options: str, help: str) -> Component:
    return Component(
        category="vlm_fusion",
        name=name,
        target=f"forge_vlm.fusions.{target}",
        options=f"forge_vlm.options:{options}",
        help=help,
    )


COMPONENTS = (
    _encoder("vit", "vit:VisionTransformer", "VitOptions", "A small vision transformer of our own."),
    _encoder("clip", "hf:clip", "ClipOptions", "CLIP's vision tower; needs transformers."),
    _encoder("siglip", "hf:siglip", "SiglipOptions", "SigLIP's vision tower; needs transformers."),
    _encoder("idefics3", "hf:idefics3", "Idefics3Options", "Idefics 3's vision tower; needs transformers."),
    _connector("linear", "LinearConnector", "LinearOptions", "One matrix."),
    _connector("mlp", "MlpConnector", "MlpOptions", "Two matrices with a GELU between them."),
    _connector("average_pool", "AveragePool", "AveragePoolOptions", "The mean of each window of tokens."),
    _connector("attentional_pool", "AttentionalPool", "AttentionalPoolOptions", "Attention in each window."),
    _connector("pixel_shuffle", "PixelShuffle", "PixelShuffleOptions", "Neighbours side by side."),
    Component(
        category="vlm_encoder",
        name="patches",
        target="forge_vlm.encoders.patches:PatchTransformer",
        options="forge_vlm.options_packed:PatchesOptions",
        help="Images in sizes of their own, as patches (Qwen2-VL, Qwen2.5-VL).",
    ),
    Component(
        category="vlm_connector",
        name="patch_merger",
        target="forge_vlm.encoders.patches:PatchMerger",
        options="forge_vlm.options_packed:MergerOptions",
        help="Squares of neighbouring patches in one token (Qwen2-VL).",
    ),
    Component(
        category="vlm_encoder",
        name="tiles",
        target="forge_vlm.encoders.tiles:TileTransformer",
        options="forge_vlm.options_tiled:TilesOptions",
        help="Images as tiles, all of which see each other (Llama 3.2 Vision).",
    ),
    _fusion("joint", "joint:JointFusion", "JointOptions", "Visual tokens in the sequence, one decoder."),
    _fusion(
        "cross_attention",
        "cross_attention:CrossAttentionFusion",
        "CrossAttentionOptions",
        "Blocks in which text asks visual tokens.",
    ),
    Component(
        category="vlm_fusion",
        name="gated_cross_attention",
        target="forge_vlm.fusions.gated_cross:GatedCrossFusion",
        options="forge_vlm.options_tiled:GatedCrossOptions",
        help="Blocks in place of the decoder's own in which text asks visual tokens (Llama 3.2 Vision).",
    ),
    _fusion("mot", "mot:MotFusion", "MotOptions", "A transformer a modality, one attention over both."),
    _fusion("moma", "moma:MomaFusion", "MomaOptions", "Experts a modality, those of [moe]."),
    _metric("exact_match", "answers:ExactMatch", None, "Answers that are token for token the right one."),
    _metric("vqa_accuracy", "answers:VqaAccuracy", None, "How far people agree with the answers (VQA)."),
    _metric(
        "relaxed_accuracy",
        "answers:RelaxedAccuracy",
        "RelaxedAccuracyOptions",
        "Right answers, numbers within a tolerance (ChartQA).",
    ),
    _metric("caption_loss", "captions:CaptionLoss", None, "Loss and perplexity of samples with an image."),
    _metric(
        "multiple_choice",
        "choices:MultipleChoice",
        "MultipleChoiceOptions",
        "Questions whose right choice is the likeliest.",
    ),
    Component(
        category="data_source",
        name="images",
        target="forge_vlm.data.folder:build",
        options="forge_vlm.data.options:ImagesOptions",
        help="A JSONL file of conversations or captions, and the images that it names.",
    ),
    Component(
        category="data_source",
        name="hf",
        target="forge_vlm.data.hf:build",
        options="forge_vlm.data.options:HfImagesOptions",
        help="Hugging Face data sets with columns of images; by number, or read as a stream.",
    ),
    Component(
        category="data_source",
        name="webdataset",
        target="forge_vlm.data.webdataset:build",
        options="forge_vlm.data.options:WebDatasetOptions",
        help="Tar shards of images or videos with text, read by offset.",
    ),
    Component(
        category="data_source",
        name="webvid",
        target="forge_vlm.data.webvid:build",
        options="forge_vlm.data.options:WebVidOptions",
        help="CSV files of captions, and the videos that they name.",
    ),
    Component(
        category="vlm_frames",
        name="uniform",
        target="forge_vlm.data.frames:uniform",
        options="forge_vlm.data.options:UniformOptions",
        help="Equal distances in time, the first and the last frame among them.",
    ),
    Component(
        category="vlm_frames",
        name="stretches",
        target="forge_vlm.data.frames:stretches",
        options="forge_vlm.data.options:StretchesOptions",
        help="The first frame of each of equal stretches (Qwen2-VL).",
    ),
    Component(
        category="data_source",
        name="digits",
        target="forge_vlm.data.digits:build",
        options="forge_vlm.data.options:DigitsOptions",
        help="Questions about the handwritten digits that scikit-learn brings.",
    ),
)
