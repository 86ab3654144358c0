"""What a bad step leaves behind: its batch and a summary of the state, in `incidents/` of the run folder."""

from __future__ import annotations

import io
import json
import math
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from forge_core.contract import Batch, BatchStream
from forge_core.files import replace_file
from forge_core.optim.tensors import local

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession

KEPT = 3  # a verdict reaches the host at most two steps late


class RecordedStream:
    """A batch stream that remembers the micro-batches of the last few steps, so that a bad one can be
    written."""

    def __init__(self, stream: BatchStream) -> None:
        self._stream = stream
        self.recent: deque[tuple[int, list[Batch]]] = deque(maxlen=KEPT)

    @property
    def position(self) -> int:
        return self._stream.position

    def take(self, count: int) -> list[Batch]:
        before = self._stream.position
        batches = self._stream.take(count)
        self.recent.append((before, batches))
        return batches

    @property
    def skip(self) -> Any:
        """The stream's, where it has one."""
        return self._stream.skip  # type: ignore[attr-defined]

    def state_dict(self) -> dict[str, Any]:
        return self._stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._stream.load_state_dict(state)


def write_incident(session: TrainingSession, step: int, loss: float, norm: float) -> str:
    """Write `incidents/step_NNNNNNNN/`: batch.npz (arrays `MICROBATCH.KEY`) and summary.json.

    Called by every rank. Rank 0 writes the summary and its batch, other ranks that read samples of their own
    write batch_rank_N.npz. Each file is there whole or not at all.

    Returns:
        Where to look, or why there is nothing: a full disk does not decide what becomes of a bad step.
    """
    folder = session.run.path / "incidents" / f"step_{step:08d}"
    summary: dict[str, Any] = {
        "step": step,
        "loss": _number(loss),
        "grad_norm": _number(norm),
        "skipped_in_a_row": session.guard.streak,
        "learning_rates": {
            n: [g["lr"] for g in o.optimizer.param_groups] for n, o in session.optimizers.items()
        },
        "parameters": _parameter_norms(session),
    }
    stream = session.stream
    back = session.step - step
    arrays: dict[str, Any] | None = None
    if isinstance(stream, RecordedStream) and back < len(stream.recent):
        position, batches = stream.recent[-1 - back]
        summary["samples"] = {"first": position, "micro_batches": len(batches)}
        arrays = {
            f"{i}.{k}": v.numpy()
            for i, b in enumerate(batches)
            for k, v in b.items()
            if isinstance(v, Tensor)
        }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if arrays is not None and session.mesh.counts_data:
            name = "batch.npz" if session.ranks.is_main else f"batch_rank_{session.ranks.rank}.npz"
            packed = io.BytesIO()
            np.savez_compressed(packed, **arrays)
            replace_file(folder / name, packed.getbuffer())
        if session.ranks.is_main:
            replace_file(folder / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror or error}"
    return f"see {folder}"


def _parameter_norms(session: TrainingSession) -> dict[str, dict[str, Any]]:
    """Norm and number of non-finite entries of each parameter, to tell bad data from broken weights."""
    named = session.freeze.named
    names = [*named] if session.control is None else sorted({*named, *session.freeze.elsewhere})
    with torch.no_grad():
        wide = torch.float32 if session.device.type == "mps" else torch.float64
        found = torch.zeros(len(names), 2, dtype=wide, device=session.device)
        for row, name in enumerate(names):
            if name in named:
                held = local(named[name])
                both = torch.stack((held.to(wide).square().sum(), (~torch.isfinite(held)).sum().to(wide)))
                found[row] = both * session.global_norm.weight(named[name]) if session.control else both
        if session.control is not None:
            torch.distributed.all_reduce(found)
        return {
            name: {"norm": _number(math.sqrt(square)), "non_finite": round(count)}
            for name, (square, count) in zip(names, found.tolist(), strict=True)
        }


def _number(value: float) -> float | str:
    """JSON has no NaN: a number, or its name."""
    return value if math.isfinite(value) else str(value)
