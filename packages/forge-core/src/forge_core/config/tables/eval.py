"""`[eval]`: evaluation on held-out data and on named sets, and the sample at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from forge_core.config.fields import evolve, key, table
from forge_core.errors import Problem

if TYPE_CHECKING:
    from forge_core.config.config import Config

SAMPLE_TOKENS = 200
"""Length of the sample where nothing says otherwise and the model can see that far."""


@table
class EvalSet:
    """One named set to evaluate on; all of it, whatever `data.holdout` is."""

    name: str = key(help="Name of the set; its loss is logged as eval/NAME/loss.")
    source: str = key("text", component="data_source", help="Kind of source.")
    path: str | None = key(None, help="File or folder of the source.", derived="the source's own default")


@table
class EvalConfig:
    """Evaluation while training: on the held-out part of the data, or on named sets."""

    interval: int = key(
        0, ge=0, unit="steps", help="Updates between evaluations; 0 evaluates only at the end."
    )
    steps: int = key(50, ge=0, help="Batches of each set; 0 takes the whole set, each sample once.")
    batch_size: int | None = key(
        None, gt=0, unit="sequences", help="Sequences of an evaluation batch.", derived="train.batch_size"
    )
    at_end: bool = key(True, help="Evaluate once more after the last update.")
    sets: list[EvalSet] = key(
        factory=list, help="Sets to evaluate on instead of a held-out part of the training data."
    )
    sample: bool = key(False, help="Print a sample of what the model makes at the end.")
    sample_tokens: int | None = key(
        None,
        ge=0,
        unit="tokens",
        help="Length of that sample; stating it asks for one, 0 prints none.",
        derived=f"{SAMPLE_TOKENS}, less where model.max_seq_len is short; 0 without eval.sample",
    )
    sample_prompt: str = key("", help="Start of that sample.", derived="the start of a held-out document")

    def problems(self) -> Iterator[Problem]:
        names = [each.name for each in self.sets]
        for i, name in enumerate(names):
            if not name:
                yield Problem(f"sets.{i}.name", "is empty", "metrics are called after it")
            elif name in names[:i]:
                yield Problem(f"sets.{i}.name", f"two sets are called {name!r}", "give each its own name")

    def resolve(self, config: Config) -> EvalConfig:
        changes: dict[str, Any] = {}
        if self.batch_size is None:
            changes["batch_size"] = config.get("train").batch_size
        if self.sample_tokens is None:
            # a fifth of what the model can see is left to the prompt
            visible = config.get("model").max_seq_len or config.get("train").seq_len
            fits = max(1, min(SAMPLE_TOKENS, visible - -(-visible // 5)))
            changes["sample_tokens"] = fits if self.sample else 0
        return evolve(self, **changes) if changes else self
