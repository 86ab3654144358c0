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
        name="synthetic",
        target="forge_core.data.synthetic:build",
        options="forge_core.data.options:SyntheticOptions",
        help="Random tokens, for benchmarks.",
    ),
)
