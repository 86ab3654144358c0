"""The loss "cross_entropy": fused with the head where that pays, and the plain form for logits that exist."""

from __future__ import annotations

from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from forge_core.config.tables import LossConfig
from forge_core.loss.fused import fused_cross_entropy
from forge_core.loss.shift import IGNORE

_SMALL = 1 << 18
"""Logits up to which calls cost more than memory: the plain form makes fewer of them."""


@attrs.frozen
class CrossEntropy:
    """Cross-entropy summed over supervised tokens, with z-loss; what a component of category "loss" builds.

    Attributes:
        z_loss_weight: weight of the squared log-normaliser.
        chunk_size: most tokens whose logits exist at a time; 0 chooses.
    """

    z_loss_weight: float = 0.0
    chunk_size: int = 0

    def __call__(
        self,
        hidden: Tensor,
        head_weight: Tensor,
        targets: Tensor,
        *,
        scale: float | Tensor | None = None,
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Loss () with a graph, times `scale`, and token losses (...) without; see `fused_cross_entropy`."""
        if self._is_small(hidden, head_weight, targets):
            logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), head_weight)
            if softcap is not None:
                logits = softcap * torch.tanh(logits / softcap)
            loss, token_loss = _summed(logits, targets, self.z_loss_weight)
            return _scaled(loss, scale), token_loss
        return fused_cross_entropy(
            hidden,
            head_weight,
            targets,
            z_loss_weight=self.z_loss_weight,
            chunk_size=self.chunk_size,
            scale=scale,
            softcap=softcap,
        )

    def from_logits(
        self, logits: Tensor, targets: Tensor, *, scale: float | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The same from logits (..., V) that exist because something else needs them."""
        loss, token_loss = cross_entropy_from_logits(logits, targets, self.z_loss_weight)
        return _scaled(loss, scale), token_loss

    def _is_small(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> bool:
        """Whether the plain form gives the same in less time: few logits and exact arithmetic."""
        return (
            not hasattr(weight, "to_local")
            and targets.numel() * len(weight) <= _SMALL
            and hidden.dtype is weight.dtype
            and hidden.dtype in (torch.float32, torch.float64)
            and not torch.is_autocast_enabled(hidden.device.type)
        )


def build_cross_entropy(config: LossConfig, options: Any = None) -> CrossEntropy:
    """The loss of a `[loss]` table. It takes no options of its own."""
    return CrossEntropy(config.z_loss_weight, config.chunk_size)


def cross_entropy_from_logits(
    logits: Tensor, targets: Tensor, z_loss_weight: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Cross-entropy of logits that exist, in fp32 (fp64 for fp64 logits).

    Args:
        logits: (..., V), any floating dtype.
        targets: (...) int64, already shifted; -100 supervises nothing.
        z_loss_weight: weight of the squared log-normaliser, summed over supervised tokens.

    Returns:
        loss () with a graph, summed over supervised tokens, z-loss included; token losses (...) without a
        graph, cross-entropy alone, 0 where the target is -100.
    """
    exact = torch.promote_types(logits.dtype, torch.float32)
    return _summed(logits.reshape(-1, logits.shape[-1]).to(exact), targets, z_loss_weight)


def _summed(logits: Tensor, targets: Tensor, z_loss_weight: float) -> tuple[Tensor, Tensor]:
    """The same for logits (N, V) in the precision they are summed in, in as few calls as there are."""
    labels = targets.reshape(-1)
    log_probabilities = logits.log_softmax(1)
    token_loss = F.nll_loss(log_probabilities, labels, reduction="none", ignore_index=IGNORE)
    loss = token_loss.sum()
    if z_loss_weight:
        normaliser = logits.logsumexp(1).masked_fill(labels == IGNORE, 0.0)
        loss = loss + z_loss_weight * normaliser.square().sum()
    return loss, token_loss.detach().view(targets.shape)


def _scaled(loss: Tensor, scale: float | Tensor | None) -> Tensor:
    """The loss times `scale`, in its own precision."""
    return loss if scale is None else (loss * scale).to(loss.dtype)
