"""Loss scaling for fp16, whose numbers end at 6e-8: gradients are those of a larger loss (Micikevicius
et al. 2018)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from forge_core.errors import ForgeError
from forge_core.optim.tensors import local

START, GROWTH, BACKOFF, INTERVAL = 2.0**12, 2.0, 0.5, 2000


class LossScaler:
    """A factor on the loss that halves when gradients overflow, and doubles after many updates in which none
    did.

    All on the device: nothing waits. A step function multiplies the gradients it starts backwards with by
    what `begin` returns; `apply_update` divides them again.

    Args:
        device: where the loss lives.
        interval: updates without an overflow before the factor doubles.

    Attributes:
        scale: () fp32. good: () int32, updates without an overflow since the last change.
    """

    def __init__(self, device: torch.device | str = "cpu", interval: int = INTERVAL) -> None:
        self.scale = torch.full((), START, device=device)
        self.good = torch.zeros((), dtype=torch.int32, device=device)
        self.interval = interval
        self._begun = False

    def begin(self) -> Tensor:
        """The factor of the step that starts now, () fp32."""
        self._begun = True
        return self.scale

    @torch.no_grad()
    def unscale_(self, grads: Sequence[Tensor]) -> None:
        """Divide the finished gradients of the step, in place.

        Raises:
            ForgeError: the step did not ask for the factor, so its gradients do not have it.
        """
        if not self._begun:
            raise ForgeError(
                "this step function does not scale its loss, which fp16 needs",
                'multiply by session.scaler.begin(), or set train.dtype = "bf16"',
            )
        self._begun = False
        if grads:
            inverse = 1.0 / self.scale
            torch._foreach_mul_([local(g) for g in grads], inverse.to(grads[0].device))

    @torch.no_grad()
    def update(self, finite: Tensor) -> None:
        """Learn from the gradients' norm: () bool, whether it was finite; the same on all ranks."""
        good = torch.where(finite, self.good + 1, 0)
        grown = good >= self.interval
        kept = torch.where(grown, self.scale * GROWTH, self.scale)
        self.scale.copy_(torch.where(finite, kept, self.scale * BACKOFF))
        self.good.copy_(torch.where(grown, 0, good))

    def state_dict(self) -> dict[str, Any]:
        """Factor and counter; reading them waits for the device."""
        return {"scale": float(self.scale), "good": int(self.good)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up saved ones."""
        self.scale.fill_(state["scale"])
        self.good.fill_(state["good"])
