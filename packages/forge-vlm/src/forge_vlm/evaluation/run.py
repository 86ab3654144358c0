"""One pass over the evaluation sets for all metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from forge_core.contract import Batch
from forge_core.errors import ForgeError
from forge_vlm.data.asked import Asked
from forge_vlm.evaluation.metric import Seen, VlmMetric
from forge_vlm.generate import Prompts, generate, questions_of
from forge_vlm.table import VlmConfig

if TYPE_CHECKING:
    from forge_core import TrainingSession
    from forge_core.contract import Evaluator

Found = dict[str, float]


class Evaluation:
    """Metrics by name over the same batches and the same answers.

    Whichever is asked for first measures all; the others then have their numbers.
    """

    def __init__(self, metrics: Mapping[str, VlmMetric]) -> None:
        self.metrics = dict(metrics)
        self._ready: dict[str, Found] = {}

    def evaluators(self) -> dict[str, Evaluator]:
        """One for each metric, see `forge_evaluators`."""
        return {name: partial(self._one, name) for name in self.metrics}

    def _one(self, name: str, session: TrainingSession) -> Found:
        if name not in self._ready:
            self._ready = self.measure(session)
        return self._ready.pop(name)

    def measure(self, session: TrainingSession) -> dict[str, Found]:
        """What every metric finds over all evaluation sets; nothing where the run is asked to stop."""
        sums: dict[str, list[float]] = {}
        for seen in self._seen(session):
            for name, metric in self.metrics.items():
                more = metric.measure(seen)
                before = sums.get(name, [0.0] * len(more))
                sums[name] = [a + b for a, b in zip(before, more, strict=True)]
            if session.check_stop():
                return {name: {} for name in self.metrics}
        whole = self._over_ranks(session, sums)
        return {
            name: metric.result(whole[name]) if name in whole else {} for name, metric in self.metrics.items()
        }

    def _seen(self, session: TrainingSession) -> Iterator[Seen]:
        asks = any(metric.asks for metric in self.metrics.values())
        for dataset in session.data.evaluation:
            source: Any = getattr(dataset, "source", None)
            for batch in dataset:
                most = int(getattr(source, "most_choices", 0))  # of a stream, so far
                prompts, right = questions_of(batch)
                yield Seen(
                    session=session,
                    batch=batch,
                    prompts=prompts,
                    right=right,
                    facts=facts_of(source, batch),
                    answers=answers_to(session, prompts) if asks else [[]] * len(right),
                    most_choices=most,
                )

    def _over_ranks(
        self, session: TrainingSession, sums: Mapping[str, Sequence[float]]
    ) -> dict[str, Sequence[float]]:
        """The sums of all ranks, which have as many batches; exact for counts up to 2 ** 53."""
        if session.control is None:
            return dict(sums)
        own = {name: values for name, values in sums.items() if not self.metrics[name].summed}
        counts = session.mesh.counts_data
        mine = [value * counts for values in own.values() for value in values]
        total = torch.tensor(mine, dtype=torch.float64, device=session.device)
        torch.distributed.all_reduce(total)
        rest = iter(total.tolist())
        return {**sums, **{name: [next(rest) for _ in values] for name, values in own.items()}}


def facts_of(source: Any, batch: Batch) -> list[Asked | None]:
    """What a source knows of the samples of a batch beside their tokens: its `question(number)`, by number or
    of a stream by the order of reading. A source without one knows nothing."""
    say = getattr(source, "question", None)
    if say is None or "numbers" not in batch:
        return [None] * len(batch["targets"])
    return [say(number) for number in batch["numbers"].tolist()]


def answers_to(session: TrainingSession, prompts: Prompts) -> list[list[int]]:
    """What the model says to each prompt, greedily."""
    return generate(
        session.model,
        prompts,
        max_new_tokens=max(1, session.config[VlmConfig].answer_tokens),
        eos_id=session.data.tokenizer.eos_id,
        stop_early=session.control is None,
        temperature=0.0,
    )


def metric_names(config: VlmConfig) -> list[str]:
    """Those that are measured: `vlm.metrics`, and exact_match where the model answers."""
    first = ["exact_match"] if config.answer_tokens else []
    return list(dict.fromkeys([*first, *config.metrics]))


def evaluators_of(session: TrainingSession) -> dict[str, Evaluator]:
    """The evaluators of a session.

    Raises:
        ForgeError: a component is no `VlmMetric`, or asks a model that is to give no answers.
    """
    config = session.config[VlmConfig]
    metrics: dict[str, VlmMetric] = {}
    for name in metric_names(config):
        metric = session.component("vlm_metric", name)(session, session.options("vlm", name))
        if not isinstance(metric, VlmMetric):
            raise ForgeError(f"the metric {name} is a {type(metric).__name__}", "derive it from VlmMetric")
        if metric.asks and not config.answer_tokens:
            raise ForgeError(
                f"{name} asks the model, and vlm.answer_tokens = 0", "say how long answers may be"
            )
        metrics[name] = metric
    return Evaluation(metrics).evaluators() if metrics else {}
