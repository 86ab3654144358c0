"""`[moe]` and the options of its routers. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from forge_core.config import Config, Problem, key, table
from forge_core.config.fields import evolve
from forge_core.config.tables import ModelConfig


@table
class SoftmaxOptions:
    """`moe.router = "softmax"`: probabilities over all experts, of which the k largest are taken."""

    renormalise: bool = key(
        True,
        help="Divide the chosen probabilities by their sum, which is a softmax over the chosen logits alone.",
    )
    scaling: float = key(1.0, gt=0, help="Factor of the weights.")


@table
class SigmoidOptions:
    """`moe.router = "sigmoid"`: a score for each expert by itself, chosen by group (DeepSeek-V3)."""

    renormalise: bool = key(True, help="Divide the chosen scores by their sum.")
    scaling: float = key(1.0, gt=0, help="Factor of the weights.")
    n_groups: int = key(1, ge=1, help="Groups of neighbouring experts.")
    top_groups: int = key(
        1, ge=1, help="Groups that a token may choose from: those whose two best scores have the largest sum."
    )


@table
class ExpertChoiceOptions:
    """`moe.router = "expert_choice"`: each expert picks its tokens, from the whole micro-batch."""

    look_ahead: bool = key(
        False,
        help="Accept that the choice for a token depends on later tokens and on other sequences, so that a "
        "causal model trains on what it cannot know when it generates.",
        computes=False,
    )
    auxiliary: bool = key(
        False,
        help="Learn beside it to tell from a token alone which experts will choose it, and go by that "
        "outside of training: evaluation and generation then look at no other token.",
    )


@table
class MlaConfig:
    """Attention whose keys and values come from one small vector a token (MLA; DeepSeek-V2)."""

    kv_rank: int = key(0, ge=0, help="Width of that vector; 0: ordinary attention.")
    q_rank: int = key(0, ge=0, help="Width of what queries are made from; 0: from the token itself.")
    nope_dim: int = key(
        128,
        gt=0,
        help="Width of a head's part without positions; model.head_dim is that of the rotated part.",
    )
    v_dim: int = key(128, gt=0, help="Width of a head's values.")
    interleaved: bool = key(
        True,
        help="Rotated pairs are neighbours (0, 1), (2, 3), ... in the projections, as in DeepSeek's weights.",
    )


@table
class MoeConfig:
    """Feed-forward parts made of experts, of which each token uses a few."""

    computes: ClassVar[bool] = True
    num_experts: int = key(8, gt=0, help="Routed experts of a layer.")
    top_k: int = key(2, gt=0, help="Experts that a token uses.")
    router: str = key("softmax", component="moe_router", help="How tokens find their experts.")
    expert_hidden_dim: int | None = key(
        None, gt=0, help="Width of one expert; smaller ones are finer.", derived="model.ffn_hidden_dim"
    )
    shared_experts: int = key(
        0, ge=0, help="Experts that every token uses besides, each as wide as the others."
    )
    shared_hidden_dim: int | None = key(
        None,
        gt=0,
        help="Width of all shared experts together.",
        derived="shared_experts * expert_hidden_dim",
    )
    shared_gate: bool = key(False, help="Multiply what shared experts give by a learnt sigmoid of the token.")
    every: int = key(1, ge=1, help="Every n-th layer has experts (layers n - 1, 2n - 1, ... from 0).")
    first_dense: int = key(0, ge=0, help="The first layers, which keep their MLP.")
    layers: list[int] = key(
        factory=list, ge=0, help="The layers that have experts, in place of every and first_dense."
    )
    jitter: float = key(
        0.0,
        ge=0,
        lt=1,
        help="While training the router sees x times a uniform draw from 1 - jitter .. 1 + jitter.",
        computes=False,
    )
    capacity_factor: float = key(
        0.0,
        ge=0,
        help="An expert takes at most ceil(tokens * top_k * factor / num_experts) of a micro-batch's "
        "assignments, the rest are dropped; 0 drops nothing.",
    )
    capacity_priority: str = key(
        "position",
        choices=("position", "score"),
        help="Whose assignments are kept: all first choices before second ones and early tokens before late "
        "ones, or those with the largest weights.",
    )
    aux_loss: str = key(
        "sequence",
        choices=("sequence", "micro_batch", "global", "exact"),
        help="Over what the load is balanced: each sequence, the micro-batch of a rank, that of all ranks, "
        "or the whole update, which routes every micro-batch twice.",
        computes=False,
    )
    aux_loss_weight: float = key(
        0.01, ge=0, help="Weight of the balance loss, of each layer.", computes=False
    )
    router_z_loss_weight: float = key(
        0.001,
        ge=0,
        help="Weight of the squared log-normaliser of the router's logits, of each layer.",
        computes=False,
    )
    bias_rate: float | None = key(
        None,
        ge=0,
        help="Step by which an update moves the bias that experts are chosen with, towards even load; 0: no "
        "bias.",
        derived="0.001 for the sigmoid router, else 0",
        computes=False,
    )
    bias_schedule: str = key(
        "constant",
        choices=("constant", "linear_warmup", "cosine"),
        help="How bias_rate changes over the run: not at all, up over the first tenth, or down to 0.",
        computes=False,
    )
    bias_centred: bool = key(
        False, help="Take the mean off each step of the bias, so that it does not drift.", computes=False
    )
    gradient_scaling: bool = key(
        False,
        help="Scale the gradient of each expert's weights by the mean load over its own in the update "
        "before, within 1/8 and 8; the forward stays as it is.",
        computes=False,
    )
    kernel: str = key(
        "auto",
        choices=("auto", "grouped", "loop"),
        help="Products of all experts in one grouped call or one after another; auto takes grouped where "
        "dtype, alignment and device allow it.",
        computes=False,
    )
    layer_metrics: bool = key(
        False, help="Log load, entropy, dead experts and drops of each layer, too.", computes=False
    )
    ep: int = key(
        1,
        ge=1,
        help="Ranks that divide the experts, out of the data ranks of distributed.dp_shard.",
        computes=False,
    )
    mla: MlaConfig = key(factory=MlaConfig, help="Latent attention beside the experts.")
    upcycle_from: str | None = key(
        None,
        help="Folder of a dense model (Hugging Face) whose MLPs every expert starts from.",
        computes=False,
    )
    upcycle_noise: float = key(
        0.0,
        ge=0,
        help="Share of each expert's hidden units that start anew, so that experts differ.",
        lt=1,
        computes=False,
    )

    def resolve(self, config: Config) -> MoeConfig:
        changes: dict[str, object] = {}
        width = self.expert_hidden_dim or config[ModelConfig].ffn_hidden_dim
        if self.expert_hidden_dim is None:
            changes["expert_hidden_dim"] = width
        if self.shared_hidden_dim is None and width is not None and self.shared_experts:
            changes["shared_hidden_dim"] = self.shared_experts * width
        if self.bias_rate is None:
            changes["bias_rate"] = 0.001 if self.router == "sigmoid" else 0.0
        return evolve(self, **changes)

    def for_one_process(self) -> MoeConfig:
        """All experts on one rank."""
        return evolve(self, ep=1)

    def problems(self) -> Iterator[Problem]:
        if self.top_k > self.num_experts:
            yield Problem("top_k", f"{self.top_k} is more than num_experts = {self.num_experts}")
        if self.num_experts % self.ep:
            yield Problem("ep", f"{self.ep} does not divide num_experts = {self.num_experts}")
        if self.shared_gate and not self.shared_experts:
            yield Problem("shared_gate", "there are no shared experts", "set shared_experts")
        if self.layers and (self.every > 1 or self.first_dense):
            yield Problem("layers", "names the layers itself", "drop every and first_dense, or layers")


def experts_per_token(moe: MoeConfig) -> float:
    """Experts that a token uses, on average where experts choose their tokens; what a limit drops counts."""
    return moe.capacity_factor if moe.router == "expert_choice" and moe.capacity_factor else moe.top_k


def has_experts(moe: MoeConfig, index: int) -> bool:
    """Whether layer `index` (from 0) has experts."""
    if moe.layers:
        return index in moe.layers
    return index >= moe.first_dense and (index + 1) % moe.every == 0


def expert_layers(moe: MoeConfig, n_layers: int) -> list[int]:
    """The layers with experts, in order."""
    return [index for index in range(n_layers) if has_experts(moe, index)]
