"""What a checkpoint remembers of the freeze schedule and of what was seen. Imports no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from forge_core.contract import CheckpointExtra

if TYPE_CHECKING:
    from forge_core import TrainingSession

PARTS = ("encoder", "connector", "decoder")


def freeze_state(session: TrainingSession) -> CheckpointExtra:
    """Which parts trained in the update that was saved; a run that says otherwise of it is refused.

    Schedules may differ in what comes later, and in aliases that only one of the two has.
    """

    def state_dict() -> dict[str, Any]:
        step = session.step
        return {"step": step, "aliases": aliases_at(session, step), "parts": parts_at(session, step)}

    def compatible(version: int, saved: Mapping[str, Any]) -> str:
        step, then = int(saved["step"]), saved["aliases"]
        now = aliases_at(session, step)
        for name in sorted(set(then) & set(now)):
            if then[name] != now[name]:
                return f"{name} was {then[name]} in update {step}, and now is {now[name]} in it"
        before, parts = saved.get("parts", {}), parts_at(session, step)
        for name in sorted(set(before) & set(parts)):
            if before[name] != parts[name]:
                return f"other parameters of {name} were frozen in update {step} than now are in it"
        return ""

    return CheckpointExtra(
        name="freeze",
        version=1,
        state_dict=state_dict,
        load_state_dict=lambda saved: None,
        compatible=compatible,
    )


def aliases_at(session: TrainingSession, step: int) -> dict[str, str]:
    """By alias of parts of the model whether it is frozen, trained or trained in part in update `step`."""
    found = {}
    for name in PARTS:
        count, parameters = session.freeze.frozen_at(name, step)
        if parameters:
            found[name] = "trained" if not count else "frozen" if count == parameters else "part frozen"
    return found


def parts_at(session: TrainingSession, step: int) -> dict[str, str]:
    """By alias of parts of the model that are frozen in part in update `step` a digest of what is frozen."""
    found = {}
    for name, how in aliases_at(session, step).items():
        if how == "part frozen":
            names = "\n".join(session.freeze.frozen_names(name, step))
            found[name] = hashlib.blake2b(names.encode(), digest_size=8).hexdigest()
    return found


def seen_state(session: TrainingSession) -> CheckpointExtra:
    """What a run that goes on counts further: tokens of text that were trained on, and what was counted since
    the last log."""
    from forge_vlm.metrics import counts_of

    counts = counts_of(session)

    def load(saved: Mapping[str, Any]) -> None:
        counts.trained = int(saved["trained"])
        counts.sums = {str(name): int(value) for name, value in saved.get("sums", {}).items()}

    def state_dict() -> dict[str, Any]:
        # the time that visual tokens took is not known any more
        sums = {name: value for name, value in counts.sums.items() if name != "visual_tokens"}
        return {"trained": counts.trained, "sums": sums}

    return CheckpointExtra(
        name="seen",
        version=1,
        state_dict=state_dict,
        load_state_dict=load,
    )
