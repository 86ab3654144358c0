"""From the tables `[data]`, `[train]` and `[eval]` to the batches of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from forge_core.config.config import Config
from forge_core.config.tables import DataConfig, EvalConfig, ModelConfig, TrainConfig
from forge_core.contract import EvaluationSet
from forge_core.data.agreement import open_together
from forge_core.data.choices import (
    BuildSource,
    Source,
    SourceChoice,
    draw_order,
    evaluation_choices,
    training_choices,
)
from forge_core.data.evaluation import evaluation_set
from forge_core.data.opening import Opener
from forge_core.data.order import SampleOrder
from forge_core.data.stream import SampleStream
from forge_core.data.tokenizer import Tokenizer, load_tokenizer
from forge_core.errors import DataError

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession

__all__ = ["BuildSource", "Place", "SamplePipeline", "SourceChoice", "build_data", "build_text_data"]

HOLDOUT = "holdout"
"""Name of the evaluation set that is held out of a single source."""


@attrs.frozen(kw_only=True)
class Place:
    """Where and how this process reads.

    Attributes:
        data_rank, data_size: of this process among those that read different samples.
        pin: page-locked memory, for asynchronous copies to a device.
        ahead: without workers, read one step ahead on a thread.
    """

    data_rank: int = 0
    data_size: int = 1
    pin: bool = False
    ahead: bool = False


class SamplePipeline:
    """The `DataPipeline` of sources by number; leaving it closes threads, processes and files.

    Attributes:
        train: endless micro-batches.
        evaluation: named or held-out sets, none if nothing is held out.
        tokenizer: of the text.
    """

    def __init__(
        self,
        train: SampleStream,
        evaluation: Sequence[EvaluationSet],
        tokenizer: Tokenizer,
        opened: Sequence[Any] = (),
    ) -> None:
        self.train = train
        self.evaluation = tuple(evaluation)
        self.tokenizer = tokenizer
        self._opened = tuple(opened)

    def __enter__(self) -> SamplePipeline:
        return self

    def __exit__(self, *error: object) -> None:
        with ExitStack() as stack:
            for source in self._opened:
                close = getattr(source, "close", None)
                if close is not None:
                    stack.callback(close)
            stack.callback(self.train.close)


def build_data(
    data: DataConfig,
    train: TrainConfig,
    evaluation: EvalConfig,
    *,
    vocab_size: int,
    sources: Sequence[SourceChoice],
    sets: Sequence[SourceChoice] = (),
    tokenizer: Tokenizer | None = None,
    grad_accum_steps: int = 1,
    place: Place | None = None,
    config: Config | None = None,
    component: Callable[[str, str], Any] | None = None,
) -> SamplePipeline:
    """Sources, shuffled and mixed for training, and what is evaluated on: named sets, or a share held out of
    each source.

    Args:
        data, train, evaluation: the resolved tables.
        vocab_size: rows of the embedding.
        sources: to train on, one or those of a mixture. sets: to evaluate on.
        tokenizer: by default the one that `data.tokenizer` names.
        grad_accum_steps: micro-batches of an update on each rank.
        place: of this process.
        config, component: all tables, and targets of components, see `SourceSpec`.

    Raises:
        DataError: no data, unreadable data, fewer samples than an update takes, data that ends before the
            run, ids beyond the vocabulary.
        ConfigError: no such tokenizer.
    """
    place = place or Place()
    tokenizer = tokenizer or load_tokenizer(data.tokenizer, data.eos_token)
    opener = Opener(data=data, train=train, tokenizer=tokenizer, vocab_size=vocab_size)
    opener.config, opener.component = config, component
    opener.holdout = 0.0 if sets else data.holdout
    window = train.batch_size * grad_accum_steps * place.data_size
    stream = build_stream(opener, sources, window, place)
    held = build_evaluation(opener, sources, sets, evaluation, place)
    return SamplePipeline(stream, held, tokenizer, opener.opened)


def build_stream(
    opener: Opener, sources: Sequence[SourceChoice], global_batch: int, place: Place
) -> SampleStream:
    """The training part of the sources, shuffled or mixed.

    Args:
        opener: builds the sources.
        sources: one, or those of a mixture.
        global_batch: samples of an update over all ranks.
        place: of this process.

    Raises:
        DataError: see `build_data`.
    """
    data, train = opener.data, opener.train
    opened = [opener.open(choice, "train") for choice in sources]
    order = draw_order(
        sources, opened, data, seed=opener.seed, global_batch=global_batch, seq_len=train.seq_len
    )
    check_end(order, global_batch, train.max_steps)
    return SampleStream(
        opened,
        order,
        batch_size=train.batch_size,
        data_rank=place.data_rank,
        data_size=place.data_size,
        vocab_size=opener.vocab_size,
        global_batch=global_batch,
        pin=place.pin,
        prefetch=place.ahead,
        workers=data.num_workers,
        steps_ahead=data.prefetch,
        allow_changed=data.allow_changed,
    )


def build_evaluation(
    opener: Opener,
    sources: Sequence[SourceChoice],
    sets: Sequence[SourceChoice],
    evaluation: EvalConfig,
    place: Place,
) -> list[EvaluationSet]:
    """The named sets; without any, a share held out of each source, called after it in a mixture.

    An evaluation looks at `eval.steps` batches of `eval.batch_size` sequences of each set, over all ranks
    together, so that its result does not depend on their number.
    """
    rows = evaluation.batch_size or opener.train.batch_size
    chosen: list[tuple[str, Source]] = [(each.name, opener.open(each, "all")) for each in sets]
    if not sets and opener.holdout > 0:
        for choice in sources:
            name = choice.name if opener.data.mix else HOLDOUT
            chosen.append((name, opener.open(choice, "holdout")))
    return [
        evaluation_set(
            name,
            source,
            batch_size=rows,
            limit=evaluation.steps * rows,
            data_rank=place.data_rank,
            data_size=place.data_size,
            vocab_size=opener.vocab_size,
            pin=place.pin,
            seed=opener.seed,
        )
        for name, source in chosen
    ]


def check_end(order: SampleOrder, window: int, max_steps: int) -> None:
    """Refuse data that is used up before the run is over."""
    if order.end is not None and window <= order.end < window * max_steps:
        raise DataError(
            f"the data ends after update {order.end // window}, before train.max_steps = {max_steps}",
            "allow more epochs in [[data.mix]], or lower train.max_steps",
        )


def build_text_data(session: TrainingSession) -> SamplePipeline:
    """The core's answer to `forge_build_data`: the sources that `[data]` and `[[eval.sets]]` name.

    Pinned memory on CUDA and reading ahead on any accelerator; on a CPU the model needs the cores itself.
    """
    return open_together(session, partial(_build, session))


def _build(session: TrainingSession) -> SamplePipeline:
    config = session.config
    vocab_size = config[ModelConfig].vocab_size
    assert vocab_size is not None  # resolved from the tokenizer when left out
    return build_data(
        config[DataConfig],
        config[TrainConfig],
        config[EvalConfig],
        vocab_size=vocab_size,
        sources=training_choices(config, session.component),
        sets=evaluation_choices(config, session.component),
        grad_accum_steps=session.grad_accum_steps,
        place=Place(
            data_rank=session.ranks.data_rank,
            data_size=session.ranks.data_size,
            pin=session.device.type == "cuda",
            ahead=session.device.type != "cpu",
        ),
        config=config,
        component=session.component,
    )
