"""What runs in a step: the forward, the loss terms, the step function and its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:
    from torch import Tensor, nn

    from forge_core.loop.session import TrainingSession

Batch = dict[str, Any]
"""A micro-batch: named CPU tensors. Text: `tokens`, `targets`, `positions` (B, S) int64, `documents` (B, S)
int32, `sources` (B,) int64, and where rows have padding `valid` (B, S) bool, False for it; padding is a
document of its own. On an accelerator `document_count` says how many documents all rows have together.
`targets` are already shifted: `targets[b, s]` is what position s predicts, -100 where nothing is."""


@attrs.define(kw_only=True)
class Output:
    """What a forward of one micro-batch gives. Sums, never means, so that any split of a batch adds up.

    Attributes:
        loss_sum: () fp32 with a graph: the training loss summed over supervised tokens (z-loss included).
        token_loss: (B, S) fp32, detached: cross-entropy of each position, 0 where there is no target.
        hidden: (B, S, D) final hidden states, for loss terms that need them.
        logits: (B, S, V), only when a loss term needs them.
        batch: what of the batch the tensors above belong to, where this rank computes a part of each
            sequence; None: all of it.
    """

    loss_sum: Tensor
    token_loss: Tensor
    hidden: Tensor | None = None
    logits: Tensor | None = None
    batch: Batch | None = None


class Forward(Protocol):
    """Runs one micro-batch (returned by `forge_build_forward`)."""

    def count(self, batch: Batch) -> dict[str, int]:
        """On the CPU: what losses are divided by, `tokens` (supervised) and `sequences` at least.

        `positions`, all that the model sees, is what throughput counts; without it, `tokens`.
        """
        ...

    def __call__(self, model: nn.Module, batch: Batch) -> Output: ...


class SplitForward(Forward, Protocol):
    """A forward that can also run a model that was cut into parts (`SplitSpec`), one part at a time.

    It may have `unread(*, first: bool, last: bool)`: names of what such a part does not read of a
    micro-batch, which then comes on the meta device, a shape and a type without contents.
    """

    def part(
        self, model: nn.Module, batch: Batch, carried: Sequence[Tensor] | None, *, last: bool
    ) -> Output | tuple[Tensor, ...]:
        """Run one part of the model on a micro-batch.

        Args:
            model: the part.
            batch: the micro-batch; every part has it, but for the contents of what is `unread`.
            carried: what the part before gave; None for the first.
            last: whether the result is the output; otherwise it is what travels on: tensors of the shapes
                and dtypes that `carried` tells.
        """
        ...

    def carried(self, model: nn.Module, batch: Batch) -> tuple[Tensor, ...]:
        """What travels between parts for this micro-batch, as tensors on the meta device. Those of floating
        point get a gradient."""
        ...


@attrs.frozen(kw_only=True)
class LossTerm:
    """A further term of the objective (returned by `forge_extra_losses`).

    The objective gains `weight * sum of term / global count of per`, over all micro-batches and ranks.

    Attributes:
        name: for metrics, as `loss/NAME`.
        weight: factor of the term.
        needs: "module" (only module state), "hidden" or "logits"; logits turn the fused loss off.
        per: key of `count()` that it is divided by ("tokens", "sequences", ...).
        term: `term(model, batch, output) -> ()` tensor, a sum over this micro-batch.
    """

    name: str
    weight: float
    term: Callable[[nn.Module, Batch, Output], Tensor]
    needs: str = "hidden"
    per: str = "tokens"


@attrs.define(kw_only=True)
class StepResult:
    """What a step did, on all ranks together: the same on each, but for `sums`.

    Tensors stay on the device and carry no graph; reading one is a host sync.

    Attributes:
        loss: () cross-entropy, mean over the supervised tokens of the global batch.
        objective: () what was minimised: loss, z-loss, extra and attached terms.
        grad_norm: () global L2 norm before clipping.
        ok: () bool, False where the update was skipped on the device.
        tokens: tokens the model saw, all ranks (positions, supervised or not).
        counts: global counts of the step (`tokens`, `sequences`, ...).
        sums: further sums on the device by metric name, this rank's part of each; reduced when logged.
    """

    loss: Tensor
    objective: Tensor
    grad_norm: Tensor
    ok: Tensor
    tokens: int
    counts: dict[str, int]
    sums: dict[str, Tensor] = attrs.Factory(dict)


class StepFn(Protocol):
    """One update, and the forward-only counterpart (returned by `forge_build_step_fn`).

    A step function takes its micro-batches from `session.stream`, begins with
    `count_step(session, batches)`, runs `session.forward`, and ends with `apply_update(session, loss)`, which
    clips, guards and steps the optimizers. It runs on every rank.
    """

    def train(self, session: TrainingSession, step: int) -> StepResult:
        """Run update number `step` (from 1)."""
        ...

    def evaluate(self, session: TrainingSession, batches: Iterable[Batch]) -> Mapping[str, float]:
        """Forward only: `loss_sum` and `tokens` over all ranks, each sample once."""
        ...

    def forward_only(self, session: TrainingSession, batches: Iterable[Batch]) -> None:
        """Run the model over micro-batches (on the CPU) without gradients and keep nothing, for modules that
        watch what passes (`forge_before_updates`).

        Modules keep their mode, and the random state is afterwards what it was, so that updates that follow
        draw the same noise. All ranks call it together.
        """
        ...
