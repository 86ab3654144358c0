"""All ranks open their data, or none does, and all read the same."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from forge_core.errors import DataError, ForgeError

if TYPE_CHECKING:
    from forge_core.data.pipeline import SamplePipeline
    from forge_core.loop.session import TrainingSession

P = TypeVar("P", bound="SamplePipeline")


def open_together(session: TrainingSession, build: Callable[[], P]) -> P:
    """`build()`, where several ranks run with what came of it on the others. Called by every rank.

    Raises:
        DataError: another rank could not open its data (on those that could), or the ranks read different
            data (on all).
        Whatever `build` raises.
    """
    if session.control is None:
        return build()
    pipeline, failure = None, None
    try:
        pipeline = build()
    except Exception as error:  # the others wait for what became of this rank
        failure = error
    texts = session.control.texts(json.dumps(_outcome(pipeline, failure)))
    outcomes = [json.loads(text) for text in texts]
    if failure is not None:
        raise failure
    assert pipeline is not None
    refusal = refused(outcomes) or different(outcomes)
    if refusal is not None:
        pipeline.__exit__(None, None, None)
        raise refusal
    return pipeline


def _outcome(pipeline: SamplePipeline | None, failure: Exception | None) -> dict[str, Any]:
    if pipeline is not None:
        return {"state": pipeline.train.state_dict()}
    if isinstance(failure, ForgeError):
        return {"error": failure.message, "hint": failure.hint}
    return {"error": f"{type(failure).__name__}: {failure}", "hint": ""}


def refused(outcomes: Sequence[Mapping[str, Any]]) -> DataError | None:
    """The error of the first rank that could not open its data."""
    for rank, outcome in enumerate(outcomes):
        if "error" in outcome:
            return DataError(f"rank {rank} cannot open its data: {outcome['error']}", outcome["hint"])
    return None


def different(outcomes: Sequence[Mapping[str, Any]]) -> DataError | None:
    """The error for ranks that would not read the same; names the source and the ranks."""
    first = outcomes[0]["state"]
    for rank, outcome in enumerate(outcomes):
        state = outcome["state"]
        if state == first:
            continue
        names = {*first["sources"], *state["sources"]}
        found = [n for n in sorted(names) if state["sources"].get(n) != first["sources"].get(n)]
        what = f"source {found[0]} is not the same" if found else "the data is not read in the same order"
        return DataError(f"{what} on rank 0 and rank {rank}", "give every rank the same files and options")
    return None
