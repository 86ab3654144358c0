"""Options of the core's data sources: `[data.text]`, `[data.tokens]` and so on."""

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


@table
class TokensOptions:
    """Files of token ids, mapped: `.npy` and `.bin`, a file, a folder, or a pattern such as `data/*.bin`."""

    dtype: str | None = key(
        None,
        choices=("uint8", "uint16", "uint32", "int32", "int64"),
        help="Type of the ids of `.bin` files without a header.",
        derived="the file's header",
    )
    eos_id: int | None = key(
        None, ge=0, help="Id that ends a document.", derived="the manifest's, else the tokenizer's"
    )
    check_tokenizer: bool = key(True, help="Refuse prepared tokens of another tokenizer than data.tokenizer.")
