"""`[data]`: where tokens come from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from forge_core.config.fields import evolve, key, table
from forge_core.errors import Problem
from forge_core.files import home_problem

if TYPE_CHECKING:
    from forge_core.config.config import Config


@table
class MixConfig:
    """One source of a mixture."""

    name: str = key(help="Name of the source in phases, messages and metrics.")
    source: str = key("text", component="data_source", help="Kind of source.")
    path: str | None = key(
        None, help="File or folder of the source.", derived="for text: the standard library's own sources"
    )
    weight: float | None = key(
        None,
        ge=0,
        help="Share of what is drawn, relative to the other sources; 0 draws it only in phases that say so.",
        derived="its size, so that all sources end together",
    )
    epochs: int | None = key(
        None,
        gt=0,
        help="Passes over the source after which the others take its place.",
        derived="as many as needed",
    )


@table
class PhaseConfig:
    """From `start_step` on: other weights, another scale of the learning rate."""

    start_step: int = key(ge=1, help="First update of the phase.")
    weights: dict[str, float] = key(
        factory=dict,
        ge=0,
        help="Weight of each source by name; one that is left out is not drawn. Empty: as before the phase.",
    )
    lr_scale: float = key(1.0, gt=0, help="Multiplies the learning rate of the schedule while it lasts.")


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
    mix: list[MixConfig] = key(
        factory=list,
        help="Sources to draw from by weight, instead of source and path.",
        instead_of=("source", "path"),
    )
    mix_by: str = key(
        "tokens",
        choices=("tokens", "samples"),
        help="What the weights are shares of; the two differ where the samples of sources differ in length.",
    )
    mix_temperature: float = key(
        1.0,
        gt=0,
        help="Weights become weight ** (1 / temperature): above 1 evens them out (Devlin et al. 2019).",
    )
    phases: list[PhaseConfig] = key(
        factory=list, help="Changes of weights and learning rate as the run goes on, by start_step."
    )
    num_workers: int = key(0, ge=0, help="Processes that read samples; 0 reads in the training process.")
    prefetch: int = key(
        2,
        ge=1,
        unit="steps",
        help="Updates that each worker reads ahead; without workers, 1 on an accelerator.",
    )
    allow_changed: bool = key(
        False,
        help="Go on from a saved position although the seed, the data or the global batch changed since.",
    )

    def problems(self) -> Iterator[Problem]:
        yield from home_problem("cache_dir", self.cache_dir)
        yield from mix_problems(self.mix)
        yield from phase_problems(self)
        if self.packing == "best_fit" and not self.pack:
            yield Problem(
                "packing",
                "best_fit puts unrelated documents into one sequence and needs data.pack = true",
                "leave data.pack out, or choose concatenate",
            )

    def resolve(self, config: Config) -> DataConfig:
        return self if self.seed is not None else evolve(self, seed=config.get("train").seed)


def mix_problems(mix: Sequence[MixConfig]) -> Iterator[Problem]:
    """What is wrong with the sources of a mixture."""
    names = [each.name for each in mix]
    for i, each in enumerate(mix):
        if not each.name:
            yield Problem(f"mix.{i}.name", "is empty", "phases and metrics use it")
        elif each.name in names[:i]:
            yield Problem(f"mix.{i}.name", f"two sources are called {each.name!r}", "give each its own name")
    weights = [each.weight for each in mix]
    if None in weights and any(weight is not None for weight in weights):
        i = weights.index(None)
        yield Problem(
            f"mix.{i}.weight",
            "is left out, while other sources have one",
            "give each a weight, or none to draw by size",
        )
    elif mix and None not in weights and not any(weights):
        yield Problem("mix", "all weights are 0: nothing would be drawn", "give one source a weight above 0")


def phase_problems(data: DataConfig) -> Iterator[Problem]:
    """What is wrong with the phases."""
    names = [each.name for each in data.mix]
    starts = [phase.start_step for phase in data.phases]
    for i, phase in enumerate(data.phases):
        at = f"phases.{i}"
        if i and starts[i] <= starts[i - 1]:
            yield Problem(f"{at}.start_step", f"{starts[i]} does not come after {starts[i - 1]}")
        if phase.weights and not names:
            hint = "name the sources in [[data.mix]], or say phases anew (data.phases = [] for none)"
            yield Problem(f"{at}.weights", "there is no mixture to weigh", hint)
            continue
        for name in phase.weights:
            if name not in names:
                hint = f"sources: {', '.join(names)}"
                yield Problem(f"{at}.weights.{name}", f"no source of the mixture is called {name!r}", hint)
        if phase.weights and not any(phase.weights.values()):
            yield Problem(
                f"{at}.weights",
                "all weights are 0: nothing would be drawn",
                "give one source a weight above 0",
            )
