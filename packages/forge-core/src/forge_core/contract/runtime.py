"""What lives beside the loop: checkpointer, observers, writers, generator, data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

    from forge_core.contract.step import Batch, StepResult
    from forge_core.loop.session import TrainingSession


class Checkpointer(Protocol):
    """Keeps the run's state (returned by `forge_build_checkpointer`). The core alone has none.

    Everything is called on every rank at the same point; only `close` may not work together with other ranks.
    """

    def load(self, session: TrainingSession) -> int:
        """Restore the state to go on from and return its step; 0 for a fresh start."""
        ...

    def due(self, step: int) -> bool:
        """Whether the schedule asks for a save after update `step`.

        Asked after every update, and once more when it said yes and the guard's verdicts are all known. It is
        the place to raise what went wrong in the background.
        """
        ...

    def save(self, session: TrainingSession, step: int, kind: str) -> None:
        """Save the state after update `step`; kind: scheduled, initial, final or emergency."""
        ...

    def staged(self) -> None:
        """Called before anything changes what a running save still reads; returns when that is safe."""
        ...

    def rollback(self, session: TrainingSession) -> int:
        """Restore weights, optimizers and schedule of the last good save; the data position stays. Its
        step."""
        ...

    def drain(self) -> None:
        """Wait until every save is durable."""
        ...

    def close(self) -> None:
        """Release what it holds; no collective work."""
        ...


class InitialWeights(Protocol):
    """Fills a model with weights that come from elsewhere (returned by `forge_build_initial_weights`)."""

    def __call__(self, model: nn.Module, /) -> None: ...


class Observer:
    """Base of what `forge_observers` returns: override the events of interest; the others cost nothing.

    Events happen on every rank. One that only looks at this rank's numbers may differ from rank to rank; no
    rank may wait for others in it unless all do.
    Observers look, they do not change the run. Arguments carry no graph; reading a tensor is a host sync.
    """

    def train_begin(self, session: TrainingSession) -> None:
        """After everything is built and restored, before the first update."""

    def gradients_ready(self, session: TrainingSession, step: int) -> None:
        """Gradients of the update are complete, not yet clipped."""

    def step_end(self, session: TrainingSession, step: int, result: StepResult) -> None:
        """After every update, good or skipped."""

    def skipped(self, session: TrainingSession, step: int, reason: str) -> None:
        """The host learnt that update `step` was skipped (up to two steps later)."""

    def phase(self, session: TrainingSession, step: int, what: str) -> None:
        """A stage of the freeze or data schedule began with update `step`."""

    def eval_end(self, session: TrainingSession, step: int, metrics: Mapping[str, float]) -> None:
        """An evaluation after update `step` is done."""

    def checkpoint_durable(self, session: TrainingSession, step: int, path: Path, kind: str) -> None:
        """A checkpoint is complete on disk under its final path."""

    def train_end(self, session: TrainingSession, step: int, reason: str) -> None:
        """The loop ended without an exception; reason: done, signal, stopped."""

    def exception(self, session: TrainingSession, error: BaseException) -> None:
        """The loop ends with an exception. No collective work here."""


EVENTS = tuple(name for name in vars(Observer) if not name.startswith("_"))


class Writer(Protocol):
    """A place for metrics, on rank 0. Component category "writer": `target(session, options) -> Writer`."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Generator(Protocol):
    """Produces text or more from the model (returned by `forge_build_generator`).

    A prompt is a text, or a mapping with `prompt` and what else this generator takes beside a text, such as
    `images`; one that takes no more than text refuses others.
    """

    def sample(self, session: TrainingSession) -> str:
        """What is printed at the end of a run: a short sample, of about `eval.sample_tokens` tokens.

        Called on every rank with the same random state; all must make the same tokens.
        """
        ...

    def generate(
        self, session: TrainingSession, prompts: Sequence[Any], *, max_new_tokens: int, **sampling: Any
    ) -> list[str]: ...


class SampleSource(Protocol):
    """Samples by number. Component category "data_source": `target(spec, options) -> SampleSource`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Sample `index` as numpy arrays by batch key (text: tokens, targets, positions, documents; (S,))."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes when the samples change."""
        ...


class BatchStream(Protocol):
    """Endless micro-batches of one rank with one global position (samples handed out, all ranks).

    It may have `skip(count)`, which moves on as `take` does and reads nothing: for ranks that need no
    samples.
    """

    @property
    def position(self) -> int: ...

    def take(self, count: int) -> list[Batch]:
        """The next `count` micro-batches of this rank."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class EvaluationSet(Protocol):
    """Batches to evaluate on; iterating yields each sample once, in a fixed order."""

    @property
    def name(self) -> str: ...

    def __iter__(self) -> Iterator[Batch]: ...


class DataPipeline(Protocol):
    """What `forge_build_data` returns."""

    @property
    def train(self) -> BatchStream: ...

    @property
    def evaluation(self) -> Sequence[EvaluationSet]: ...

    @property
    def tokenizer(self) -> Any: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: object) -> None: ...


Evaluator = Any
"""`f(session) -> {metric: number}`, run after the loss of each evaluation (`forge_evaluators`).

A metric is logged as `eval/NAME/METRIC`, one of empty name as `eval/NAME`.
It runs on every rank, where the model may be in parts: all run the same forwards. The numbers that rank 0
returns are logged. A long one asks `session.check_stop()` now and then and returns early, on all ranks alike.
"""


def events_of(observers: Iterable[Observer], wrappers: Iterable[Any]) -> dict[str, tuple[Any, ...]]:
    """For each event the bound methods that override it, in order, each through its observer's wrapper."""
    pairs = list(zip(observers, wrappers, strict=True))
    found: dict[str, tuple[Any, ...]] = {}
    for event in EVENTS:
        base = getattr(Observer, event)
        found[event] = tuple(
            wrap(getattr(o, event)) for o, wrap in pairs if getattr(type(o), event, base) is not base
        )
    return found
