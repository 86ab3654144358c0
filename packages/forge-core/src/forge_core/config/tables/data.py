"""`[data]`: where tokens come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from forge_core.config.fields import evolve, key, table
from forge_core.errors import Problem

if TYPE_CHECKING:
    from forge_core.config.config import Config


@table
class DataConfig:
    """Where tokens come from and how they become sequences."""

    source: str = key("text", component="data_source", help="Kind of source.")
    path: str | None = key(
        None,
        help="File or folder of the source.",
        derived="for text: the Python standard library's own sources",
    )
    tokenizer: str = key("bytes", help="'bytes', or the path of a Hugging Face tokenizer.json.")
    eos_token: str | None = key(
        None, help="Token of the vocabulary that ends a document.", derived="the tokenizer's own"
    )
    seed: int | None = key(None, ge=0, help="Seed of the order of samples.", derived="train.seed")
    pack: bool = key(True, help="Keep the documents of a sequence apart (attention, positions and targets).")
    packing: str = key(
        "concatenate",
        choices=("concatenate", "best_fit"),
        help="How documents become sequences: cut from one row, or pieces that are not cut further put "
        "together so that little is left over.",
    )
    cache_dir: str | None = key(
        None,
        help="Folder for what sources prepare once (tokens of JSONL, Parquet, chat and Hugging Face data).",
        derived="$XDG_CACHE_HOME/forge, else ~/.cache/forge",
    )
    holdout: float = key(
        0.05, ge=0, lt=1, help="Share of the documents kept for evaluation and never trained on."
    )
    allow_changed: bool = key(
        False, help="Go on from a saved position although the seed or the data changed since."
    )

    def problems(self) -> Iterator[Problem]:
        if self.packing == "best_fit" and not self.pack:
            yield Problem(
                "packing",
                "best_fit puts unrelated documents into one sequence and needs data.pack = true",
                "leave data.pack out, or choose concatenate",
            )

    def resolve(self, config: Config) -> DataConfig:
        return self if self.seed is not None else evolve(self, seed=config.get("train").seed)
