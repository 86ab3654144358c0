"""The step function: micro-batches through a schedule, equal to the core's step in one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from forge_core.contract import Batch, Output, StepResult
from forge_core.loop.accumulate import Sums, close_step, count_step, to_device, without_trace
from forge_core.loop.naming import named_parameters
from forge_pp.draws import Draws
from forge_pp.feed import Feed
from forge_pp.parts import StagedModel
from forge_pp.relay import Relay
from forge_pp.settle import settle
from forge_pp.tied import add_gradients
from forge_pp.window import Line, Window

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession


LOOKS = 4
"""Batches of an evaluation between two looks for a stop, times the ranks that batches pass through."""


class PipelineStep:
    """One update from `grad_accum_steps` micro-batches, which are the schedule's.

    Attributes:
        line: the stages of this rank. feed: their micro-batches.
        relay: for forwards alone. window: for updates.
        forward: the session's. current: the step that runs.
        draws: random numbers of the update.
    """

    line: Line
    feed: Feed
    relay: Relay
    window: Window
    forward: Any
    current: Current
    draws: Draws

    @classmethod
    def of(cls, session: TrainingSession, line: Line) -> PipelineStep:
        """The step of a session with its model and its forward."""
        step = cls()
        step.line, step.relay, step.forward = line, Relay(line), session.forward
        step.window, step.feed = Window(line, step._run), Feed(session, line)
        step.draws = Draws(several=len(line.parts) > 1)
        return step

    def train(self, session: TrainingSession, step: int) -> StepResult:
        """One update. A step without a supervised token changes nothing."""
        batches, totals = self.feed.take()
        counts = count_step(session, batches, totals)
        factor = 1.0 if session.scaler is None else session.scaler.begin()
        session.attached.begin_step(counts, factor)
        self.current = Current(session, batches, counts, 1.0 / max(counts["tokens"], 1), factor)
        any_part = next(iter(self.line.parts.values()))
        self.draws.begin()
        with session.attached.activate():
            self.window([self.forward.carried(any_part, batch) for batch in batches])
        return self._update(session, counts)

    def _update(self, session: TrainingSession, counts: dict[str, int]) -> StepResult:
        """Norm, clip, guard, optimizer; what is reported comes with the norm's reduction."""
        model, sums = session.model, self.current.sums
        assert isinstance(model, StagedModel)
        zero = torch.zeros((), dtype=torch.promote_types(session.param_dtype, torch.float32))
        zero = zero.to(session.device)
        if not hasattr(sums, "loss"):
            sums.count(zero, zero)
        for term in session.loss_terms:
            sums.add(f"loss/{term.name}", zero)
        if model.tied and counts["tokens"]:
            named = named_parameters(model)
            add_gradients([named[name] for name in model.tied], self.line)
        return close_step(session, counts, sums, self.current.scale)

    def _run(self, stage: int, number: int, came: tuple[Tensor, ...]) -> Any:
        """One micro-batch through one stage: what travels on, or from the last stage its part of the
        objective."""
        now, last = self.current, stage == self.line.count - 1
        part, batch = self.line.parts[stage], now.batch(number)
        self.draws.of(stage, number)
        given = self.forward.part(part, batch, came if stage else None, last=last)
        extra = now.terms(part, batch, given if last else NOTHING, modules=True)
        if extra is not None:
            settle(extra * now.factor, came)
        return now.objective(part, batch, given) if last else given

    def evaluate(self, session: TrainingSession, batches: Iterable[Batch]) -> Mapping[str, float]:
        """Sum of token losses and count of supervised tokens, over all ranks; one read-back at the end."""
        total = torch.zeros((), dtype=torch.float64, device=session.device)
        tokens, between = 0, LOOKS * self.line.group.size()
        for number, (batch, counts) in enumerate(self.feed.each(batches), start=1):
            tokens += counts["tokens"]
            output = self.forward_alone(session, batch)
            if output is not None:
                total += output.token_loss.sum()
            if number % between == 0 and session.check_stop():  # all ranks wait for each other in it
                break
        self.relay.finish()
        mesh = session.mesh
        both = torch.stack((total / mesh.loss_copies, total.new_full((), tokens * mesh.counts_data)))
        torch.distributed.all_reduce(both)
        loss_sum, count = both.tolist()
        return {"loss_sum": loss_sum, "tokens": count}

    def forward_only(self, session: TrainingSession, batches: Iterable[Batch]) -> None:
        """Run the stages over micro-batches and keep nothing. Before an update its micro-batches draw the
        random numbers here that they will draw in it."""
        with without_trace(session):
            self.draws.begin()
            for number, batch in enumerate(batches):
                self.forward_alone(session, batch, number)
            self.relay.finish()

    def forward_alone(
        self, session: TrainingSession, batch: Batch, number: int | None = None
    ) -> Output | None:
        """A forward without a backward; its output on the rank of the last stage.

        Args:
            number: of the micro-batch, where it draws the random numbers that it has in an update.
        """
        any_part = next(iter(self.line.parts.values()))
        travelling = self.forward.carried(any_part, batch)
        here = to_device(batch, session.device)

        def run(stage: int, came: tuple[Tensor, ...] | None) -> Any:
            last = stage == self.line.count - 1
            if number is not None:
                self.draws.of(stage, number)
            return self.forward.part(self.line.parts[stage], here, came, last=last)

        found: Output | None = self.relay.forward(travelling, run)
        return found


@attrs.define
class Current:
    """The step that runs.

    Attributes:
        batches: its micro-batches on the CPU, each moved when a stage of this rank first needs it.
        counts: global counts. scale: 1 / supervised tokens. factor: of every gradient besides.
        loss_terms: further terms of the objective.
        sums: what this rank's stages add up, without a graph.
    """

    session: TrainingSession
    batches: list[Batch]
    counts: Mapping[str, int]
    scale: float
    factor: Any
    sums: Sums = attrs.Factory(Sums)
    here: dict[int, Batch] = attrs.Factory(dict)

    def batch(self, number: int) -> Batch:
        """A micro-batch on the device."""
        if number not in self.here:
            self.here[number] = to_device(self.batches[number], self.session.device)
        return self.here[number]

    def objective(self, part: Any, batch: Batch, output: Output) -> Tensor:
        """() what the last stage makes of a micro-batch."""
        extra = self.terms(part, output.batch or batch, output, modules=False)
        self.sums.count(output.token_loss.sum(), output.loss_sum.detach())
        main = output.loss_sum * self.scale
        found: Tensor = (main if extra is None else main + extra) * self.factor
        return found

    def terms(self, part: Any, batch: Batch, output: Output, modules: bool) -> Tensor | None:
        """() sum of the further terms that need modules alone, which every stage has, or of those that need
        more."""
        total: Tensor | None = None
        for term in self.session.loss_terms:
            if (term.needs == "module") != modules:
                continue
            value = term.term(part, batch, output) * (term.weight / max(self.counts[term.per], 1))
            self.sums.add(f"loss/{term.name}", value.detach())
            total = value if total is None else total + value
        return total


NOTHING: Any = Output(loss_sum=torch.zeros(()), token_loss=torch.zeros(0, 0))
"""What terms that only need modules get in place of an output, where a stage has none."""
