"""Building the sources of a run from what its configuration says of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import attrs

from forge_core.config.config import Config
from forge_core.config.tables import DataConfig, TrainConfig
from forge_core.data.choices import Source, SourceChoice
from forge_core.data.source import SourceSpec
from forge_core.data.tokenizer import Tokenizer

BuildComponent = Callable[[str, str], Any]


@attrs.define(kw_only=True)
class Opener:
    """Builds sources of one run.

    Attributes:
        data, train: the resolved tables.
        tokenizer: of all sources. vocab_size: rows of the embedding.
        holdout: share of each source that is not trained on.
        opened: what was built, to be closed.
        config, component: see `SourceSpec`.
    """

    data: DataConfig
    train: TrainConfig
    tokenizer: Tokenizer
    vocab_size: int
    holdout: float = 0.0
    opened: list[Any] = attrs.field(factory=list)
    config: Config | None = None
    component: BuildComponent | None = None

    def open(self, choice: SourceChoice, split: Literal["train", "holdout", "all"]) -> Source:
        """One split of a source."""
        data = self.data
        spec = SourceSpec(
            name=choice.name,
            path=choice.path,
            split=split,
            seq_len=self.train.seq_len,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            pack=data.pack,
            holdout=0.0 if split == "all" else self.holdout,
            seed=self.seed,
            packing="best_fit" if data.packing == "best_fit" else "concatenate",
            cache_dir=data.cache_dir,
            config=self.config,
            component=self.component,
        )
        source = choice.build(spec, choice.options)
        self.opened.append(source)
        return source

    @property
    def seed(self) -> int:
        """Seed of the order of samples."""
        return self.train.seed if self.data.seed is None else self.data.seed
