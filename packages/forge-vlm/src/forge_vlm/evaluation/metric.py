"""What every metric of `vlm.metrics` offers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from forge_core.contract import Batch
from forge_vlm.data.asked import Asked
from forge_vlm.generate import Prompts

if TYPE_CHECKING:
    from forge_core import TrainingSession


@attrs.frozen(kw_only=True)
class Seen:
    """One batch of one rank, B rows; of a packed row its first sample, of a conversation its first answer.

    Attributes:
        session: model and tokenizer.
        batch: as the data gives it, on the CPU.
        prompts: what comes before the first supervised token of each row.
        right: ids that are supervised from there on, their end included; empty for a row without a label,
            which counts nowhere.
        facts: what else is known of a sample, None where nothing is.
        answers: ids that the model gives, its end included; empty where no metric asks it.
        most_choices: of any sample of the set, of a stream of any so far; the same on all ranks.
    """

    session: TrainingSession
    batch: Batch
    prompts: Prompts
    right: Sequence[list[int]]
    facts: Sequence[Asked | None]
    answers: Sequence[list[int]]
    most_choices: int

    def text(self, ids: Sequence[int]) -> str:
        """Ids as text, without the end of the document and blanks around."""
        tokenizer: Any = self.session.data.tokenizer
        found: str = tokenizer.decode([i for i in ids if i != tokenizer.eos_id])
        return found.strip()


class VlmMetric:
    """Base of metrics; category "vlm_metric": `target(session, options) -> VlmMetric`.

    What `measure` returns is added up over batches and ranks, so that a sample counts once on any number of
    them. Ranks may hold parts of the model: all run the same forwards, whatever their rows.

    Attributes:
        asks: the model is to answer (greedily, `vlm.answer_tokens` at most).
        summed: what `measure` returns is over all ranks already, as `StepFn.evaluate` gives it.
    """

    asks: bool = False
    summed: bool = False

    def __init__(self, session: TrainingSession, options: Any) -> None:
        self.session, self.options = session, options

    def measure(self, seen: Seen) -> Sequence[float]:
        """Sums over the rows of a batch, always as many."""
        raise NotImplementedError

    def result(self, sums: Sequence[float]) -> dict[str, float]:
        """From the sums over all samples to numbers by name, "" for the metric's own; empty: none to tell.

        By default the first sum over the second.
        """
        return {"": sums[0] / sums[1]} if sums[1] else {}
