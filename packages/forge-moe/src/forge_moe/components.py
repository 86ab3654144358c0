"""Routers by name. Category "moe_router": `target(spec: RouterSpec, options) -> Router`."""

from __future__ import annotations

from forge_core.contract import Component

COMPONENTS = (
    Component(
        category="moe_router",
        name="softmax",
        target="forge_moe.routers:SoftmaxRouter",
        options="forge_moe.table:SoftmaxOptions",
        help="The k largest probabilities of a softmax over all experts.",
    ),
    Component(
        category="moe_router",
        name="sigmoid",
        target="forge_moe.routers:SigmoidRouter",
        options="forge_moe.table:SigmoidOptions",
        help="The k largest of independent scores, from the best groups of experts (DeepSeek-V3).",
    ),
    Component(
        category="moe_router",
        name="expert_choice",
        target="forge_moe.routers:ExpertChoiceRouter",
        options="forge_moe.table:ExpertChoiceOptions",
        help="Each expert picks its tokens, from the whole micro-batch; looks ahead.",
    ),
)
