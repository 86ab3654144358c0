"""What any update of a run saw, computed again from its configuration, without training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from forge_core.config.config import Config
from forge_core.config.fields import evolve
from forge_core.config.tables import DataConfig, EvalConfig, ModelConfig, TrainConfig
from forge_core.data.choices import BuildSource, training_choices
from forge_core.data.inspection import decode_sample, stretches_of
from forge_core.data.journal import digest, find_start
from forge_core.data.opening import Opener
from forge_core.data.pipeline import Place, build_stream
from forge_core.data.source import Arrays
from forge_core.data.stream import SampleStream
from forge_core.data.tokenizer import Tokenizer, load_tokenizer
from forge_core.errors import DataError


@attrs.frozen(kw_only=True)
class SeenSample:
    """One sequence of an update.

    Attributes:
        position: of the sample in the run. micro_batch, data_rank, row: where it was trained on.
        source, sample: name of the source and number of the sample in it.
        documents: names or numbers of the documents in it, as far as the source knows.
        tokens: (S,) ids. supervised: how many have a target.
        text: the tokens decoded.
    """

    position: int
    micro_batch: int
    data_rank: int
    row: int
    source: str
    sample: int
    documents: list[str]
    tokens: list[int]
    supervised: int
    text: str


def seen_in_step(
    folder: Path, config: Config, component: Callable[[str, str], BuildSource], step: int
) -> list[SeenSample]:
    """All sequences of update `step`, in their global order.

    Args:
        folder: of the run. config: the one it holds.
        component: the target of a component by category and name.
        step: from 1.

    Raises:
        DataError: the run has no record of its data; its configuration of data, or the data, has changed
            since; or the update does not exist.
    """
    started = find_start(folder, step)
    if step > config[TrainConfig].max_steps:
        raise DataError(f"the run ends after update {config[TrainConfig].max_steps}, before update {step}")
    if started["config"] != digest(config):
        raise DataError(
            f"update {step} was run under a configuration of data that {folder} no longer holds",
            "only updates since the last change of it can be shown",
        )
    state, ranks, rows = started["state"], started["data_ranks"], started["batch_size"]
    window = state["global_batch"]
    tokenizer = load_tokenizer(config[DataConfig].tokenizer, config[DataConfig].eos_token)
    stream = open_stream(config, component, tokenizer, window)
    try:
        stream.load_state_dict(state)
        position = state["position"] + (step - 1 - started["step"]) * window
        return _describe(stream, position, tokenizer, ranks, rows)
    finally:
        stream.close()


def open_stream(
    config: Config, component: Callable[[str, str], BuildSource], tokenizer: Tokenizer, window: int
) -> SampleStream:
    """The stream of a run as one process would read it, a whole update as one micro-batch."""
    data = evolve(config[DataConfig], num_workers=0, allow_changed=False)
    train = evolve(config[TrainConfig], batch_size=window, grad_accum_steps=1, global_batch_size=None)
    vocab_size = config[ModelConfig].vocab_size
    assert vocab_size is not None
    opener = Opener(data=data, train=train, tokenizer=tokenizer, vocab_size=vocab_size)
    opener.config, opener.component = config, component
    opener.holdout = 0.0 if config[EvalConfig].sets else data.holdout
    return build_stream(opener, training_choices(config, component), window, Place())


def _describe(
    stream: SampleStream, position: int, tokenizer: Tokenizer, ranks: int, rows: int
) -> list[SeenSample]:
    stream.rows.order = stream.order
    which, indices = stream.rows.samples((position, 1))
    arrays = stream.rows.read((position, 1))
    found = []
    for place, (source, sample) in enumerate(zip(which.tolist(), indices.tolist(), strict=True)):
        tokens = arrays["tokens"][place].tolist() if "tokens" in arrays else []
        micro_batch, rest = divmod(place, ranks * rows)
        found.append(
            SeenSample(
                position=position + place,
                micro_batch=micro_batch,
                data_rank=rest // rows,
                row=rest % rows,
                source=stream.names[source],
                sample=sample,
                documents=documents_of(stream.sources[source], sample),
                tokens=tokens,
                supervised=int(np.count_nonzero(arrays["targets"][place] >= 0)) if "targets" in arrays else 0,
                text=text_of(stream.sources[source], arrays, place, sample, tokenizer),
            )
        )
    return found


def text_of(source: Any, arrays: Arrays, place: int, sample: int, tokenizer: Tokenizer) -> str:
    """The text of row `place`, and what its source says of what is no text in it."""
    if "tokens" not in arrays:
        return ""
    row = {key: value[place] for key, value in arrays.items()}
    stretches = stretches_of(source, row, sample)
    if not stretches:
        return tokenizer.decode(row["tokens"].tolist())
    return "".join(run.text for run in decode_sample(row, tokenizer, stretches))


def documents_of(source: Any, sample: int) -> list[str]:
    """Documents of a sample, where the source has a method `documents_of(sample)`; else none."""
    find = getattr(source, "documents_of", None)
    return [] if find is None else [str(each) for each in find(sample)]
