"""The feed-forward part made of experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_core.config.fields import evolve
from forge_core.config.tables import ModelConfig
from forge_core.contract import LayerContext, TensorPlan
from forge_core.loss.attached import attach_loss
from forge_core.model import mark
from forge_core.model.mlp import MLP
from forge_moe.capacity import drop_overflow
from forge_moe.dispatch import combine, count, group, scatter_tokens
from forge_moe.experts import Experts
from forge_moe.losses import batch_loss, sequence_counts, sequence_loss, z_loss
from forge_moe.routing import Router, Routing
from forge_moe.table import MoeConfig, experts_per_token
from forge_moe.tally import EXTRAS, add_once, observed

if TYPE_CHECKING:
    from forge_moe.ranks import ExpertRanks

AUX, Z = "loss/moe_balance", "loss/moe_router_z"
"""Names of the attached losses, as metrics have them."""


class MoeFFN(nn.Module):
    """sum over the chosen experts of weight * expert(x), and what shared experts add.

    Parameters are `router.weight` (E, D), `experts.w_gate`, `experts.w_up` (E, F, D) and `experts.w_down`
    (E, D, F), each expert's matrices as `nn.Linear` has them; with `model.mlp_bias` also `b_gate`, `b_up`
    (E, F) and `b_down` (E, D). `shared` is an MLP, `shared_gate` its gate.
    Buffers: `router.expert_bias`, and `tally`, which counts what an update routed and is not saved.

    Args:
        model, moe: resolved tables.
        router: decides who goes where.
    """

    def __init__(self, model: ModelConfig, moe: MoeConfig, router: Router) -> None:
        super().__init__()
        assert moe.expert_hidden_dim is not None
        self.moe = moe
        self.router = router
        gated = bool(model.gated_mlp)
        self.experts = Experts(
            moe.num_experts,
            model.dim,
            moe.expert_hidden_dim,
            activation=model.activation,
            gated=gated,
            bias=model.mlp_bias,
            kernel=moe.kernel,
            scaled=moe.gradient_scaling,
        )
        self.experts.active_share = experts_per_token(moe) / moe.num_experts
        self.shared = self.shared_gate = None
        if moe.shared_experts:
            wide = evolve(model, ffn_hidden_dim=moe.shared_hidden_dim)
            self.shared = MLP(wide)
            self.shared_gate = nn.Linear(model.dim, 1, bias=False) if moe.shared_gate else None
        self.tally: Tensor
        self.register_buffer(
            "tally", torch.empty(moe.num_experts + EXTRAS, dtype=torch.float64), persistent=False
        )
        mark(self, "tally", init="zeros")
        self.step_counts: Tensor | None = None
        self.counting: Tensor | None = None
        self.ranks: ExpertRanks | None = None

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D), the residual not added; invalid tokens get 0 from routed experts."""
        flat = x.reshape(-1, x.shape[-1])
        valid = None if context.valid is None else context.valid.reshape(-1)
        routing: Routing = self.router(flat, valid)
        if self.counting is not None:
            self.counting.add_(count(routing.expert, self.moe.num_experts))
        learning = self.training and torch.is_grad_enabled()
        if learning:
            routing = self._attach(routing, x.shape[0], valid)
        chosen = routing
        if self.moe.capacity_factor and routing.token is None:
            moe = self.moe
            routing = drop_overflow(
                routing, moe.top_k, moe.num_experts, moe.capacity_factor, moe.capacity_priority
            )
        if learning:
            dropped = None if routing is chosen else (routing.expert != chosen.expert).sum()
            add_once(self.tally, observed(chosen, valid, self.moe.num_experts, dropped).to(self.tally.dtype))
        out = self._routed(flat, routing).to(x.dtype).view(x.shape)
        return out if self.shared is None else out + self._always(x, context)

    def _routed(self, x: Tensor, routing: Routing) -> Tensor:
        """(T, D) -> (T, D) in the precision of the weights."""
        groups = group(routing.expert, self.moe.num_experts)
        rows = scatter_tokens(x, groups, routing, self.moe.top_k)
        if self.ranks is None:
            rows = self.experts(rows, groups.ends)
        else:
            rows = self.ranks.run(self.experts, rows, groups.counts, groups.ends)
        return combine(rows, groups, routing, self.moe.top_k, x.shape[0])

    def _always(self, x: Tensor, context: LayerContext) -> Tensor:
        assert self.shared is not None
        y: Tensor = self.shared(x, context)
        return y if self.shared_gate is None else y * torch.sigmoid(self.shared_gate(x))

    def _attach(self, routing: Routing, rows: int, valid: Tensor | None) -> Routing:
        """The routing whose weights carry the losses of this layer."""
        moe, weight = self.moe, routing.weight
        if moe.router_z_loss_weight:
            value = z_loss(routing.logits, valid) * moe.router_z_loss_weight
            weight = attach_loss(weight, value, Z, "positions")
        if moe.aux_loss_weight and routing.token is None:
            value, per = self._balance(routing, rows, valid)
            weight = attach_loss(weight, value * moe.aux_loss_weight, AUX, per)
        return routing._replace(weight=weight)

    def _balance(self, routing: Routing, rows: int, valid: Tensor | None) -> tuple[Tensor, str]:
        """() the balance loss before its weight, and what it is divided by."""
        experts, scores, ranks = self.moe.num_experts, routing.scores, self.ranks
        if self.moe.aux_loss == "sequence":
            counts = sequence_counts(routing.expert, rows, experts, valid, len(scores) // max(rows, 1))
            counts = counts if ranks is None else ranks.over_context(counts)
            return sequence_loss(scores, routing.expert, rows, valid, counts), "sequences"
        if self.moe.aux_loss == "exact" and self.step_counts is not None:
            return batch_loss(scores, self.step_counts, valid), "positions"
        counts = count(routing.expert, experts)
        if ranks is not None:
            over_data = self.moe.aux_loss == "global"
            counts = ranks.over_data(counts) if over_data else ranks.over_context(counts)
        return batch_loss(scores, counts, valid), "positions"

    def parallel_plan(self) -> TensorPlan:
        """Each token alone: context ranks can divide them. Tensor ranks run all of it alike."""
        return TensorPlan(sequence="tokens")

    def extra_repr(self) -> str:
        return f"experts={self.moe.num_experts}, top_k={self.moe.top_k}"


def moe_layers(model: nn.Module) -> list[tuple[str, MoeFFN]]:
    """Name and module of every feed-forward part of experts, in the order of the model."""
    return [(name, module) for name, module in model.named_modules() if isinstance(module, MoeFFN)]


def build_ffn(session: Any, model: ModelConfig, moe: MoeConfig) -> MoeFFN:
    """A part for one layer, with the router that the configuration names."""
    from forge_moe.routing import RouterSpec

    spec = RouterSpec(
        dim=model.dim,
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        jitter=moe.jitter,
        bias=bool(moe.bias_rate),
        capacity_factor=moe.capacity_factor,
    )
    target = session.component("moe_router", moe.router)
    return MoeFFN(model, moe, target(spec, session.options("moe", moe.router)))
