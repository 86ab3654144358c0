"""The stages called as one model, by all ranks alike: what generation and evaluators do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_core.contract import Batch, Output
from forge_core.errors import ForgeError
from forge_core.model.dimensions import Dimensions
from forge_pp.parts import StagedModel
from forge_pp.relay import Relay

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession
    from forge_pp.step import PipelineStep


class Whole:
    """Runs a model that is cut into stages; forward alone.

    Hidden states travel, and what `travelling(**given)` of a model names besides; such a model takes what
    came as `carried`, and gives tuples.

    Args:
        relay: between the ranks. dtype: of hidden states between stages.
    """

    def __init__(self, relay: Relay, dtype: torch.dtype) -> None:
        self.relay, self.dtype = relay, dtype

    def __call__(self, tokens: Tensor, cache: dict[int, Any] | None, given: dict[str, Any]) -> Tensor:
        """(B, S, D) hidden states after the final norm, on the rank of the last stage; elsewhere any."""
        parts = self.relay.line.parts
        first: Any = next(iter(parts.values()))
        shape = (*tokens.shape, first.config.dim)
        more = getattr(first, "travelling", None)
        travels = (torch.empty(shape, dtype=self.dtype, device="meta"), *(more(**given) if more else ()))

        def run(stage: int, came: tuple[Tensor, ...] | None) -> Any:
            part: Any = parts[stage]
            if part.part is not None:
                part.part.begin(tokens.shape[1], whole=True, cached=cache is not None)
            mine = None if cache is None else cache[stage]
            if more is not None:
                return part(tokens, carried=came, cache=mine, **given)
            hidden = part(tokens if came is None else None, embeds=came and came[0], cache=mine, **given)
            return hidden if stage == self.relay.line.count - 1 else (hidden,)

        if torch.is_grad_enabled():
            raise ForgeError("stages called as one model run forward alone", "use torch.no_grad()")
        hidden: Tensor | None = self.relay.forward(travels, run)
        self.relay.finish()
        return torch.zeros(shape, dtype=self.dtype, device=tokens.device) if hidden is None else hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., V) on every rank, of what the last stage's rank passes."""
        parts = self.relay.line.parts
        last = self.relay.line.count - 1
        if last in parts:
            part: Any = parts[last]
            return self.relay.from_last(part.logits(hidden))
        any_part: Any = next(iter(parts.values()))
        width = Dimensions.of(any_part.config).vocab_size
        return self.relay.from_last(hidden.new_empty(*hidden.shape[:-1], width))

    def new_cache(self, *arguments: Any) -> dict[int, Any]:
        """A cache for each stage of this rank."""
        parts: dict[int, Any] = dict(self.relay.line.parts)
        return {stage: part.new_cache(*arguments) for stage, part in parts.items()}


class RelayedForward:
    """The session's forward, which also takes the model as a whole, forward alone: its output is then the
    same on every rank of a pipeline."""

    def __init__(self, session: TrainingSession, step: PipelineStep) -> None:
        self.session, self.step, self.inner = session, step, step.forward

    def count(self, batch: Batch) -> dict[str, int]:
        counts: dict[str, int] = self.inner.count(batch)
        return counts

    def __call__(self, model: nn.Module, batch: Batch) -> Output:
        if not isinstance(model, StagedModel):
            output: Output = self.inner(model, batch)
            return output
        if torch.is_grad_enabled():
            raise ForgeError("stages called as one model run forward alone", "use torch.no_grad()")
        found = self.step.forward_alone(self.session, batch)
        self.step.relay.finish()
        wide = torch.promote_types(self.session.param_dtype, torch.float32)
        sums = torch.zeros((), dtype=wide, device=self.session.device)
        each = torch.zeros(batch["targets"].shape, dtype=wide, device=self.session.device)
        if found is not None:
            sums, each = found.loss_sum.to(wide), found.token_loss.to(wide)
        return Output(loss_sum=self.step.relay.from_last(sums), token_loss=self.step.relay.from_last(each))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
