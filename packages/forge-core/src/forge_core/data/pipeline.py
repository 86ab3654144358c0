"""From the tables `[data]`, `[train]` and `[eval]` to the batches of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import attrs

from forge_core.config.tables import DataConfig, EvalConfig, ModelConfig, TrainConfig
from forge_core.contract import SampleSource
from forge_core.data.evaluation import HoldoutSet
from forge_core.data.order import ShuffledOrder
from forge_core.data.source import SourceSpec
from forge_core.data.stream import SampleStream, too_small
from forge_core.data.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession

BuildSource = Callable[[SourceSpec, Any], SampleSource]


class SamplePipeline:
    """The `DataPipeline` of sources by number; leaving it closes threads and files.

    Attributes:
        train: endless micro-batches.
        evaluation: held-out sets, none if nothing is held out.
        tokenizer: of the text.
    """

    def __init__(self, train: SampleStream, evaluation: Sequence[HoldoutSet], tokenizer: Tokenizer) -> None:
        self.train = train
        self.evaluation = tuple(evaluation)
        self.tokenizer = tokenizer

    def __enter__(self) -> SamplePipeline:
        return self

    def __exit__(self, *error: object) -> None:
        with ExitStack() as stack:
            for source in (*self.train.sources, *(held.source for held in self.evaluation)):
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
    build: BuildSource,
    options: Any,
    tokenizer: Tokenizer | None = None,
    grad_accum_steps: int = 1,
    data_rank: int = 0,
    data_size: int = 1,
    pin: bool = False,
    prefetch: bool = False,
) -> SamplePipeline:
    """One source, shuffled for training, with a share held out.

    An evaluation looks at `eval.steps` batches of `eval.batch_size` sequences, over all ranks together, so
    that its result does not depend on their number.

    Args:
        data, train, evaluation: the resolved tables.
        vocab_size: rows of the embedding.
        build: the component's target; options: its options.
        tokenizer: by default the one that `data.tokenizer` names.
        grad_accum_steps: micro-batches of an update on each rank.
        data_rank, data_size: of this process among those that read different samples.
        pin, prefetch: see `SampleStream`.

    Raises:
        DataError: no data, unreadable data, fewer samples than an update takes, ids beyond the vocabulary.
        ConfigError: no such tokenizer.
    """
    tokenizer = tokenizer or load_tokenizer(data.tokenizer, data.eos_token)
    spec = SourceSpec(
        name=data.source,
        path=data.path,
        split="train",
        seq_len=train.seq_len,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        pack=data.pack,
        holdout=data.holdout,
        seed=train.seed if data.seed is None else data.seed,
        packing="best_fit" if data.packing == "best_fit" else "concatenate",
        cache_dir=data.cache_dir,
    )
    samples = build(spec, options)
    window = train.batch_size * grad_accum_steps * data_size
    if not len(samples):
        raise too_small(0, window, train.batch_size, data_size)
    reading: dict[str, Any] = {
        "data_rank": data_rank,
        "data_size": data_size,
        "vocab_size": vocab_size,
        "pin": pin,
    }
    stream = SampleStream(
        (samples,),
        ShuffledOrder(len(samples), spec.seed),
        batch_size=train.batch_size,
        global_batch=window,
        prefetch=prefetch,
        allow_changed=data.allow_changed,
        **reading,
    )
    held = []
    if data.holdout > 0:
        rows = evaluation.batch_size or train.batch_size
        source = build(attrs.evolve(spec, split="holdout"), options)
        held.append(HoldoutSet("holdout", source, batch_size=rows, limit=evaluation.steps * rows, **reading))
    return SamplePipeline(stream, held, tokenizer)


def build_text_data(session: TrainingSession) -> SamplePipeline:
    """The core's answer to `forge_build_data`: the source that `data.source` names.

    Pinned memory on CUDA and reading ahead on any accelerator; on a CPU the model needs the cores itself.
    """
    data = session.config[DataConfig]
    vocab_size = session.config[ModelConfig].vocab_size
    assert vocab_size is not None  # resolved from the tokenizer when left out
    return build_data(
        data,
        session.config[TrainConfig],
        session.config[EvalConfig],
        vocab_size=vocab_size,
        build=session.component("data_source", data.source),
        options=session.config.options("data", data.source),
        grad_accum_steps=session.grad_accum_steps,
        data_rank=session.ranks.data_rank,
        data_size=session.ranks.data_size,
        pin=session.device.type == "cuda",
        prefetch=session.device.type != "cpu",
    )
