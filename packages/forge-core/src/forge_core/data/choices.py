"""The sources that a configuration names, and the order in which their samples are drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs

from forge_core.config.config import Config
from forge_core.config.tables import DataConfig, EvalConfig
from forge_core.contract import SampleSource
from forge_core.data.mixture import MixedSource, MixtureOrder, phase_shares
from forge_core.data.order import SampleOrder, ShuffledOrder, StreamOrder
from forge_core.data.source import DrawingSource, SequentialSource, SourceSpec
from forge_core.data.stream import size_of
from forge_core.errors import DataError

Source = SampleSource | DrawingSource | SequentialSource
BuildSource = Callable[[SourceSpec, Any], Source]


@attrs.frozen(kw_only=True)
class SourceChoice:
    """A source that is asked for.

    Attributes:
        name: in messages and metrics.
        path: see `SourceSpec`.
        build: the component's target; options: its options.
        weight, epochs: see `MixConfig`.
    """

    name: str
    path: str | None
    build: BuildSource
    options: Any = None
    weight: float | None = None
    epochs: int | None = None


def training_choices(config: Config, component: Callable[[str, str], BuildSource]) -> list[SourceChoice]:
    """Sources of `[[data.mix]]`, or the one of `[data]`.

    Args:
        config: resolved.
        component: the target of a component by category and name.
    """
    data = config[DataConfig]
    if not data.mix:
        options = config.options("data", data.source)
        build = component("data_source", data.source)
        return [SourceChoice(name=data.source, path=data.path, build=build, options=options)]
    return [
        SourceChoice(
            name=each.name,
            path=each.path,
            build=component("data_source", each.source),
            options=config.options(f"data.mix.{i}", each.source),
            weight=each.weight,
            epochs=each.epochs,
        )
        for i, each in enumerate(data.mix)
    ]


def evaluation_choices(config: Config, component: Callable[[str, str], BuildSource]) -> list[SourceChoice]:
    """Sources of `[[eval.sets]]`."""
    return [
        SourceChoice(
            name=each.name,
            path=each.path,
            build=component("data_source", each.source),
            options=config.options(f"eval.sets.{i}", each.source),
        )
        for i, each in enumerate(config[EvalConfig].sets)
    ]


def draw_order(
    choices: Sequence[SourceChoice],
    sources: Sequence[Source],
    data: DataConfig,
    *,
    seed: int,
    global_batch: int,
    seq_len: int,
) -> SampleOrder:
    """The order of all samples: shuffled, as a stream gives them, or mixed.

    Args:
        choices, sources: what was asked for and what was built for it.
        data: mixture and phases.
        seed: of the order.
        global_batch: samples of an update.
        seq_len: tokens of a sample, where a source does not say (`tokens_per_sample`).

    Raises:
        DataError: an empty source, or a stream that would be weighed by its size.
    """
    sizes = [size_of(source) for source in sources]
    for choice, size in zip(choices, sizes, strict=True):
        if size == 0:
            raise DataError(
                f"source {choice.name} has 0 samples, fewer than the batch of {global_batch} of an update",
                "give it data, or leave it out",
            )
    if not data.mix:
        label, samples = choices[0].name, sizes[0]
        return (
            StreamOrder(label=label, seed=seed)
            if samples is None
            else ShuffledOrder(samples, seed, label=label)
        )
    return mixed_order(choices, sources, data, seed=seed, global_batch=global_batch, seq_len=seq_len)


def mixed_order(
    choices: Sequence[SourceChoice],
    sources: Sequence[Source],
    data: DataConfig,
    *,
    seed: int,
    global_batch: int,
    seq_len: int,
) -> MixtureOrder:
    """The order of a mixture under its weights and phases; arguments as `draw_order` takes them."""
    sizes = [size_of(source) for source in sources]
    phases = mixture_shares(choices, sources, data, seq_len=seq_len)
    mixed = [
        MixedSource(name=choice.name, samples=size, epochs=choice.epochs)
        for choice, size in zip(choices, sizes, strict=True)
    ]
    return MixtureOrder(mixed, phases, seed, global_batch=global_batch)


def mixture_shares(
    choices: Sequence[SourceChoice], sources: Sequence[Source], data: DataConfig, *, seq_len: int
) -> list[tuple[int, tuple[float, ...]]]:
    """First update of each phase of a mixture, and the share of samples that each source has in it;
    arguments as `draw_order` takes them."""
    sizes = [size_of(source) for source in sources]
    tokens = [float(getattr(source, "tokens_per_sample", seq_len)) for source in sources]
    lengths = tokens if data.mix_by == "tokens" else [1.0] * len(sources)
    return phase_shares(
        [choice.name for choice in choices],
        first_weights(choices, sizes, lengths),
        [(phase.start_step, phase.weights) for phase in data.phases],
        lengths,
        data.mix_temperature,
    )


def first_weights(
    choices: Sequence[SourceChoice], sizes: Sequence[int | None], lengths: Sequence[float]
) -> list[float]:
    """Weights as stated, else the sizes of the sources in tokens or samples.

    Raises:
        DataError: a stream without a weight, or an `epochs` for one.
    """
    weights = []
    for choice, size, length in zip(choices, sizes, lengths, strict=True):
        if size is None and (choice.weight is None or choice.epochs is not None):
            lacking = "weight" if choice.weight is None else "number of epochs"
            raise DataError(
                f"source {choice.name} is a stream of unknown size, which leaves its {lacking} open",
                "give each source a weight, and a stream no epochs",
            )
        weights.append(float(size or 0) * length if choice.weight is None else choice.weight)
    return weights
