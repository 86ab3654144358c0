"""Loss and tokens of each source of a mixture, from the losses that training computes anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from forge_core.contract import Batch, CheckpointExtra, Forward, Metric, Observer, Output, StepResult
from forge_core.errors import DataError
from forge_core.loss import IGNORE

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession

COUNT = "tokens/"
"""Start of the names under which `count` gives the supervised tokens of each source."""


class SourceLosses(Observer):
    """What each source contributed, over all ranks: `loss/<source>`, the token mean since the last log, and
    `data/<source>/tokens`, supervised tokens since the run began.

    Sums stay on the device until they are logged; a skipped update does not count.

    Args:
        names: of the sources, in the order of a batch's `sources`.
        device: where losses are.
        counts_tokens: whether this rank is the one of those reading the same samples that counts them.
    """

    def __init__(self, names: Sequence[str], device: torch.device, counts_tokens: bool = True) -> None:
        self.names = tuple(names)
        self.totals = dict.fromkeys(self.names, 0)
        self._tokens = float(counts_tokens)
        dtype = torch.float32 if device.type == "mps" else torch.float64
        self._step = torch.zeros(2, len(names), dtype=dtype, device=device)  # loss sums, tokens
        self._logged = torch.zeros_like(self._step)

    def count(self, batch: Batch) -> dict[str, int]:
        """Supervised tokens of each source in a micro-batch on the CPU; all names are there, with 0 for a
        batch that does not say where its rows come from (an evaluation set of a plugin)."""
        if "sources" not in batch:
            return {COUNT + name: 0 for name in self.names}
        per_row = np.count_nonzero(batch["targets"].numpy() != IGNORE, axis=1)
        counted = np.bincount(batch["sources"].numpy(), weights=per_row, minlength=len(self.names))
        return {COUNT + name: int(number) for name, number in zip(self.names, counted, strict=True)}

    def add(self, batch: Batch, output: Output) -> None:
        """Add the losses of a micro-batch on the device."""
        tokens = (batch["targets"] != IGNORE).sum(1) * self._tokens
        rows = torch.stack((output.token_loss.detach().sum(1), tokens)).to(self._step.dtype)
        self._step.index_add_(1, batch["sources"].to(self._step.device), rows)

    def step_end(self, session: TrainingSession, step: int, result: StepResult) -> None:
        self._logged += torch.where(result.ok, self._step, 0.0)
        self._step.zero_()
        for name in self.names:
            self.totals[name] += result.counts.get(COUNT + name, 0)

    def metrics(self) -> list[Metric]:
        """Two metrics a source."""
        found = []
        for i, name in enumerate(self.names):
            found.append(Metric(name=f"loss/{name}", op="ratio", read=partial(self._take, i)))
            found.append(Metric(name=f"data/{name}/tokens", op="max", read=partial(self._total, name)))
        return found

    def extra(self) -> CheckpointExtra:
        """The tokens so far, which travel with checkpoints."""
        return CheckpointExtra(
            name="source_tokens", version=1, state_dict=lambda: dict(self.totals), load_state_dict=self._load
        )

    def _take(self, source: int) -> tuple[torch.Tensor, torch.Tensor]:
        loss, tokens = self._logged[:, source].clone()
        self._logged[:, source].zero_()
        return loss, tokens

    def _total(self, name: str) -> torch.Tensor:
        return torch.full((), self.totals[name], dtype=self._step.dtype, device=self._step.device)

    def _load(self, state: Mapping[str, Any]) -> None:
        self.totals |= {name: int(state[name]) for name in self.names if name in state}


class SourcedForward:
    """A forward that tells `losses` of every micro-batch that is trained on."""

    def __init__(self, forward: Forward, losses: SourceLosses) -> None:
        self.inner, self.losses = forward, losses

    def count(self, batch: Batch) -> dict[str, int]:
        return {**self.inner.count(batch), **self.losses.count(batch)}

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        output = self.inner(model, batch)
        if torch.is_grad_enabled():
            self.losses.add(batch, output)
        return output

    def part(
        self, model: nn.Module, batch: Batch, carried: Sequence[torch.Tensor] | None, *, last: bool
    ) -> Output | tuple[torch.Tensor, ...]:
        inner: Any = self.inner
        output: Output | tuple[torch.Tensor, ...] = inner.part(model, batch, carried, last=last)
        if torch.is_grad_enabled() and isinstance(output, Output):
            self.losses.add(batch, output)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def count_sources(session: TrainingSession, forward: Forward) -> Forward:
    """`forward`, or where the data comes from several sources one that counts each; called once it is built.

    Raises:
        DataError: a source is called as a metric of a loss term is.
    """
    names = getattr(session.data.train, "names", ())
    if len(names) < 2:
        return forward
    taken = {term.name for term in session.loss_terms} & set(names)
    if taken:
        raise DataError(
            f"a source and a loss term are called {sorted(taken)[0]}: both would be logged as loss/...",
            "call the source otherwise",
        )
    return SourcedForward(forward, SourceLosses(names, session.device, _counts_tokens(session)))


def _counts_tokens(session: TrainingSession) -> bool:
    """Losses come from the last part of a model that was cut, whichever of its ranks that is."""
    alike = [a for a in session.mesh.axes if not (a.data_differs or a.params_differ or a.carved_from)]
    return all(session.mesh.rank(axis.name) == 0 for axis in alike)


def source_losses(session: TrainingSession) -> list[SourceLosses]:
    """The counter of a run with several sources, as a list of at most one."""
    losses = getattr(session.forward, "losses", None)  # also of one that stands around it
    return [losses] if isinstance(losses, SourceLosses) else []
