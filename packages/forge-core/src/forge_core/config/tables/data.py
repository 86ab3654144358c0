"""`[data]`: where tokens come from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from forge_core.config.fields import evolve, key, table

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
    holdout: float = key(
        0.05, ge=0, lt=1, help="Share of the documents kept for evaluation and never trained on."
    )
    allow_changed: bool = key(
        False, help="Go on from a saved position although the seed or the data changed since."
    )

    def resolve(self, config: Config) -> DataConfig:
        return self if self.seed is not None else evolve(self, seed=config.get("train").seed)
