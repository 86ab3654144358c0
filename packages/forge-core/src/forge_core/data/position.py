"""What a saved position holds, and what must not have changed since."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from forge_core.data.order import SampleOrder, Start
from forge_core.data.wording import counted
from forge_core.errors import DataError

VERSION = 2
_log = logging.getLogger("forge.data")


@attrs.frozen(kw_only=True)
class Identity:
    """What a position belongs to.

    Attributes:
        seed: of the order.
        global_batch: samples of an update over all ranks, 0 if steps differ.
        sources: by name, `samples` (None for a stream) and `fingerprint`.
    """

    seed: int
    global_batch: int
    sources: Mapping[str, Mapping[str, Any]]


def save_position(position: int, order: SampleOrder, identity: Identity) -> dict[str, Any]:
    """The state of a stream: numbers and strings in mappings, the same on every rank."""
    drawn = order.drawn(position)
    start = order.start
    return {
        "version": VERSION,
        "position": position,
        "update": update_at(position, start, identity.global_batch),
        "seed": identity.seed,
        "global_batch": identity.global_batch,
        "sources": {name: {**kept, "drawn": drawn[name]} for name, kept in identity.sources.items()},
        "start": {
            "position": start.position,
            "update": start.update,
            "drawn": dict(start.drawn),
            "lanes": {name: list(dealt) for name, dealt in start.lanes.items()},
        },
    }


def update_at(position: int, start: Start, global_batch: int) -> int:
    """Updates done at a position; 0 where steps differ in size."""
    return start.update + (position - start.position) // global_batch if global_batch else 0


def load_position(
    state: Mapping[str, Any], order: SampleOrder, identity: Identity, *, allow_changed: bool
) -> tuple[int, SampleOrder]:
    """The position to go on from, and the order from there on.

    Where shares, phases or the set of sources have changed, the run goes on under the new ones and every
    source where it stopped. So it does with `allow_changed` after any other change.

    Raises:
        DataError: no such state; or seed, global batch, size or content of a source changed, or no source is
            left of those that were read.
    """
    position = checked(state)
    changed = list(changes(state, identity))
    if changed and not allow_changed:
        keep = "restore it"
        if len(changed) == 1 and changed[0].startswith("the global batch"):
            keep = f"set train.global_batch_size = {state['global_batch']}"
        raise DataError(
            "the data is not what the saved position belongs to: " + "; ".join(changed),
            f"{keep}, or set data.allow_changed = true to go on from there",
        )
    for text in changed:
        _log.warning("going on although %s", text)
    saved = {name: int(kept["drawn"]) for name, kept in state["sources"].items()}
    started = state["start"]
    if state["global_batch"] == identity.global_batch:
        same = order.rebased(Start(**started))
        if same.drawn(position) == {name: saved.get(name, 0) for name in order.names}:
            return position, same
        _log.info("the mixture has changed: every source goes on where it stopped")
    update = int(state["update"])
    start = Start(position=position, update=update, drawn=saved, lanes=started["lanes"])
    return position, order.rebased(start)


def checked(state: Mapping[str, Any]) -> int:
    """The position in a state. DataError if it is none of this version."""
    position = state.get("position")
    if state.get("version") != VERSION or not isinstance(position, int) or position < 0:
        raise DataError(f"this is no data position of version {VERSION}: {dict(state)}")
    missing = {"update", "seed", "global_batch", "sources", "start"} - set(state)
    if missing:
        raise DataError(f"this data position lacks {', '.join(sorted(missing))}: {dict(state)}")
    return position


def changes(state: Mapping[str, Any], identity: Identity) -> Iterator[str]:
    """What is not as it was, in words."""
    if state["seed"] != identity.seed:
        yield f"seed was {state['seed']}, is {identity.seed}"
    before, now = state["global_batch"], identity.global_batch
    if before and now and before != now:
        yield f"the global batch was {counted(before, 'sample')}, is {now}"
    saved = state["sources"]
    for name, kept in identity.sources.items():
        for key in ("samples", "fingerprint"):
            if name in saved and saved[name][key] != kept[key]:
                yield f"source {name}: {key} was {saved[name][key]}, is {kept[key]}"
    if not set(saved) & set(identity.sources):
        yield f"the sources were {_list(saved)}, are {_list(identity.sources)}"


def _list(names: Mapping[str, Any] | Sequence[str]) -> str:
    return ", ".join(names) or "none"
