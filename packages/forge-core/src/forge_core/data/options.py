"""Options of the core's data sources: `[data.text]` and `[data.synthetic]`."""

from __future__ import annotations

from forge_core.config.fields import key, table


@table
class TextOptions:
    """Files or folders of text, one document a file."""

    patterns: list[str] = key(
        factory=lambda: ["*"],
        help="Names of the files taken from a folder (fnmatch). Hidden, empty and binary files are left out.",
    )


@table
class SyntheticOptions:
    """Random tokens, made as they are read."""

    n_samples: int = key(1_000_000, gt=0, unit="sequences", help="Samples of an epoch.")
    vocab_size: int | None = key(None, gt=0, help="Tokens are drawn below this.", derived="model.vocab_size")
