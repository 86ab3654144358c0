"""The core's data sources. Category "data_source": `target(spec: SourceSpec, options) -> SampleSource`."""

from __future__ import annotations

from forge_core.contract import Component

COMPONENTS = (
    Component(
        category="data_source",
        name="text",
        target="forge_core.data.text:build",
        options="forge_core.data.options:TextOptions",
        help="Files or folders of text; without a path the sources of Python's standard library.",
    ),
    Component(
        category="data_source",
        name="tokens",
        target="forge_core.data.tokens:build",
        options="forge_core.data.options:TokensOptions",
        help="Files of token ids (.npy, .bin), mapped; what `forge data prepare` makes.",
    ),
    Component(
        category="data_source",
        name="jsonl",
        target="forge_core.data.prepared:build_jsonl",
        options="forge_core.data.options:JsonlOptions",
        help="Lines of JSON with a field of text; encoded once into data.cache_dir.",
    ),
    Component(
        category="data_source",
        name="parquet",
        target="forge_core.data.prepared:build_parquet",
        options="forge_core.data.options:ParquetOptions",
        help="Parquet files with a column of text; encoded once into data.cache_dir.",
    ),
    Component(
        category="data_source",
        name="hf",
        target="forge_core.data.hf:build",
        options="forge_core.data.options:HfOptions",
        help="Hugging Face data sets, on disk or of the hub; encoded once, or read as a stream.",
    ),
    Component(
        category="data_source",
        name="chat",
        target="forge_core.data.prepared:build_chat",
        options="forge_core.data.options:ChatOptions",
        help="Conversations in JSONL or Parquet; only the assistant's answers are learnt.",
    ),
    Component(
        category="data_source",
        name="synthetic",
        target="forge_core.data.synthetic:build",
        options="forge_core.data.options:SyntheticOptions",
        help="Random tokens, for benchmarks.",
    ),
)
