"""What does not go together where a model has experts, in words. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from forge_core.config import Config, Problem
from forge_core.config.tables import DistributedConfig, ModelConfig, TrainConfig
from forge_core.contract import MeshAxis
from forge_core.data.wording import counted
from forge_core.files import is_there
from forge_moe.table import ExpertChoiceOptions, MoeConfig, SigmoidOptions, expert_layers


def all_problems(config: Config, axes: Sequence[MeshAxis]) -> Iterator[Problem]:
    """Every problem of `[moe]` beside those of single keys."""
    yield from _layer_problems(config)
    yield from _router_problems(config)
    yield from _rank_problems(config, axes)


def _layer_problems(config: Config) -> Iterator[Problem]:
    moe, model = config[MoeConfig], config[ModelConfig]
    beyond = [index for index in moe.layers if index >= model.n_layers]
    if beyond:
        message = f"{', '.join(map(str, beyond))} of model.n_layers = {model.n_layers} do not exist"
        yield Problem("moe.layers", message, f"layers are 0 .. {model.n_layers - 1}")
    elif not expert_layers(moe, model.n_layers):
        path = "moe.every" if moe.first_dense < model.n_layers else "moe.first_dense"
        yield Problem(path, f"no layer of model.n_layers = {model.n_layers} has experts")
    if moe.mla.kv_rank and model.qk_norm:
        yield Problem("model.qk_norm", "latent attention has norms of its own", "set it to false")
    if moe.upcycle_from is not None and model.init_from is not None:
        yield Problem(
            "moe.upcycle_from", "the model starts from model.init_from already", "drop one of the two"
        )
    if moe.upcycle_from is not None and "://" not in moe.upcycle_from and not is_there(moe.upcycle_from):
        yield Problem("moe.upcycle_from", f"there is nothing at {moe.upcycle_from}", at_start=True)


def _router_problems(config: Config) -> Iterator[Problem]:
    moe, train = config[MoeConfig], config[TrainConfig]
    options = config.options("moe", moe.router)
    choosing = options if isinstance(options, ExpertChoiceOptions) else None
    if choosing is not None and not (choosing.look_ahead or choosing.auxiliary):
        message = "experts that choose tokens look at later tokens, which a causal model cannot do"
        hint = "another router, or set moe.expert_choice.auxiliary = true to generate without looking ahead"
        yield Problem("moe.router", message, f"{hint}, or look_ahead = true to accept it")
    if moe.router == "sigmoid" and isinstance(options, SigmoidOptions):
        yield from _group_problems(moe, options)
    tokens = train.batch_size * train.seq_len
    least = moe.num_experts / (tokens * moe.top_k)
    if moe.capacity_factor and moe.capacity_factor * tokens * moe.top_k / moe.num_experts < 1:
        message = f"{moe.capacity_factor:g} leaves an expert less than one of a micro-batch's {tokens} tokens"
        hint = f"at least {math.ceil(least * 1e6) / 1e6:g}, or 0 to drop nothing"
        yield Problem("moe.capacity_factor", message, hint)
    if moe.router == "expert_choice" and moe.bias_rate:
        yield Problem(
            "moe.bias_rate", "experts that choose tokens have even load by themselves", "set it to 0"
        )


def _group_problems(moe: MoeConfig, options: SigmoidOptions) -> Iterator[Problem]:
    if moe.num_experts % options.n_groups:
        message = f"{options.n_groups} does not divide moe.num_experts = {moe.num_experts}"
        yield Problem("moe.sigmoid.n_groups", message)
    elif options.top_groups > options.n_groups:
        message = f"{options.top_groups} is more than n_groups = {options.n_groups}"
        yield Problem("moe.sigmoid.top_groups", message)
    elif options.top_groups * (moe.num_experts // options.n_groups) < moe.top_k:
        message = f"{counted(options.top_groups, 'group')} of experts cannot give moe.top_k = {moe.top_k}"
        yield Problem("moe.sigmoid.top_groups", message)


def _rank_problems(config: Config, axes: Sequence[MeshAxis]) -> Iterator[Problem]:
    """What is left of the data ranks shards each expert along one of its sides."""
    moe = config[MoeConfig]
    shards = next((axis.size for axis in axes if axis.name == "dp_shard"), 1)
    if moe.ep == 1 or shards % moe.ep or moe.expert_hidden_dim is None:
        return
    rest = shards // moe.ep * config[DistributedConfig].cp
    if moe.expert_hidden_dim % rest:
        message = f"{moe.expert_hidden_dim} is not divisible by the {rest} ranks that share an expert"
        yield Problem("moe.expert_hidden_dim", message, "change it, or moe.ep")
