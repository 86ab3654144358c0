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


@table
class JsonlOptions:
    """Lines of JSON, one document a line; also compressed (`.gz`, `.zst`)."""

    field: str = key("text", help="Field that holds the text.")


@table
class ParquetOptions:
    """Parquet files, one document a row."""

    field: str = key("text", help="Column that holds the text.")


@table
class HfOptions:
    """Hugging Face data sets: a folder of `save_to_disk`, files, or a name of the hub."""

    field: str = key("text", help="Column that holds the text.")
    split: str = key("train", help="Split of the data set.")
    format: str | None = key(
        None,
        choices=("json", "parquet", "csv", "text"),
        help="How files are read.",
        derived="their suffix",
    )
    name: str | None = key(None, help="Configuration of a data set of the hub.", derived="its only one")
    revision: str | None = key(None, help="Commit of a data set of the hub.", derived="the newest")
    streaming: bool = key(
        False, help="Read the data in its own order while training; nothing is prepared or kept on disk."
    )
    shuffle_buffer: int = key(
        0,
        ge=0,
        unit="documents",
        help="Of a stream: documents among which the next is drawn; 0 keeps the order.",
    )


@table
class ChatOptions:
    """Conversations in JSONL or Parquet; only the assistant's answers are learnt."""

    field: str = key("messages", help="Field that holds the messages, each with role and content.")
    template: str = key(
        "chatml",
        choices=("chatml", "llama3", "plain", "tokenizer"),
        help="How messages become text; 'tokenizer' takes the tokenizer's own chat template.",
    )
    too_long: str = key(
        "cut",
        choices=("cut", "drop"),
        help="What becomes of a conversation that is longer than a sequence: its start, or nothing.",
    )
