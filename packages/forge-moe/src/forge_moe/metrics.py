"""Metrics of experts, read on log steps from what the last update counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forge_core.contract import Metric
from forge_moe.balance import Balance
from forge_moe.ffn import AUX, Z
from forge_moe.table import MoeConfig

if TYPE_CHECKING:
    from forge_core.loss.attached import AttachedLosses

Pair = tuple[Tensor, Tensor]


def all_metrics(
    balance: Balance,
    places: Sequence[int | None],
    indices: Sequence[int],
    moe: MoeConfig,
    attached: AttachedLosses,
) -> Iterator[Metric]:
    """Metrics of all layers together and, with `moe.layer_metrics`, of each.

    Counts are sums over ranks already: a mean over ranks, or their largest, leaves them as they are.

    Args:
        balance: what was counted.
        places: for each layer with experts its row in `balance.last`; None for one of another rank.
        indices: numbers of those layers in the whole model.
    """
    mine = [place for place in places if place is not None]
    yield from _losses(moe, len(indices), attached)
    yield Metric(name="moe/expert_balance", op="min", read=_of(balance, mine, evenness))
    yield Metric(name="moe/dead_experts", op="ratio", read=_of(balance, mine, dead))
    yield Metric(name="moe/router_entropy", op="ratio", read=_of(balance, mine, entropy))
    if moe.capacity_factor:
        yield Metric(name="moe/dropped_share", op="ratio", read=_of(balance, mine, dropped))
    if not moe.layer_metrics:
        return
    for index, place in zip(indices, places, strict=True):
        rows, name = [] if place is None else [place], f"moe/layer{index}"
        yield Metric(name=f"{name}/max_load", op="max", read=_of(balance, rows, busiest))
        yield Metric(name=f"{name}/dead_experts", op="ratio", read=_of(balance, rows, dead))
        yield Metric(name=f"{name}/router_entropy", op="ratio", read=_of(balance, rows, entropy))
        if moe.capacity_factor:
            yield Metric(name=f"{name}/dropped_share", op="ratio", read=_of(balance, rows, dropped))


def _losses(moe: MoeConfig, layers: int, attached: AttachedLosses) -> Iterator[Metric]:
    """Means over layers of the losses before their weights; the objective's parts are `loss/...`."""
    weights = {
        "moe/aux_loss": (AUX, moe.aux_loss_weight),
        "moe/router_z_loss": (Z, moe.router_z_loss_weight),
    }
    for name, (attached_name, weight) in weights.items():
        if weight:
            yield Metric(name=name, op="sum", read=_mean(attached, attached_name, weight * layers))


def _mean(attached: AttachedLosses, name: str, divisor: float) -> Callable[[], Tensor | None]:
    def read() -> Tensor | None:
        total = attached.totals().get(name)
        return None if total is None else total / divisor

    return read


def _of(
    balance: Balance, rows: Sequence[int], measure: Callable[[Tensor, int], Tensor | Pair]
) -> Callable[[], Tensor | Pair | None]:
    """Reads `measure` over some rows of the last tallies; None before the first update, and for no rows."""

    def read() -> Tensor | Pair | None:
        if balance.last is None or not rows:
            return None
        return measure(balance.last[list(rows)], balance.moe.num_experts)

    return read


def evenness(tallies: Tensor, experts: int) -> Tensor:
    """() least load over largest, in the worst of the layers: 1 is even, 0 a dead expert."""
    low, high = tallies[:, :experts].aminmax(dim=-1)
    return (low / high.clamp(min=1)).min()


def busiest(tallies: Tensor, experts: int) -> Tensor:
    """() largest load over the mean."""
    counts = tallies[:, :experts]
    return (counts.amax(-1) / counts.mean(-1).clamp(min=1e-9)).max()


def dead(tallies: Tensor, experts: int) -> Pair:
    """Experts without a token, of all."""
    idle = (tallies[:, :experts] == 0).sum()
    return idle, torch.full_like(idle, len(tallies) * experts)


def entropy(tallies: Tensor, experts: int) -> Pair:
    """Entropy of the scores in nats, over tokens; ln E where a router tells no experts apart."""
    return tallies[:, experts + 2].sum(), tallies[:, experts].sum()


def dropped(tallies: Tensor, experts: int) -> Pair:
    """Dropped assignments, of all."""
    return tallies[:, experts + 1].sum(), tallies[:, :experts].sum()
