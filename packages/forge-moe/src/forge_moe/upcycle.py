"""Experts that start as copies of a dense model's MLP (Komatsuzaki et al. 2022, sparse upcycling)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_core.config.tables import ModelConfig, TrainConfig
from forge_core.errors import ConfigError, ForgeError, Problem
from forge_core.loop.naming import global_name
from forge_core.model import copy_full_into
from forge_core.model.init import generator_for
from forge_moe.ffn import MoeFFN, moe_layers
from forge_moe.table import MoeConfig

if TYPE_CHECKING:
    from forge_core import TrainingSession

SOURCES = {
    "w_gate": "gate_proj.weight",
    "w_up": "up_proj.weight",
    "w_down": "down_proj.weight",
    "b_gate": "gate_proj.bias",
    "b_up": "up_proj.bias",
    "b_down": "down_proj.bias",
}
HIDDEN = {"w_down": 2, "b_down": None}
"""The dimension of hidden units, where it is not the second."""


def upcycle(session: TrainingSession, model: nn.Module) -> nn.Module:
    """Fill a model in memory from the dense one that `moe.upcycle_from` names.

    Every expert of a layer is a copy of its MLP, so that with weights that sum to 1 the model computes what
    the dense one did. With `moe.upcycle_noise` a share of each expert's hidden units, drawn for each, keeps
    its initial values (Nakamura et al. 2025). Routers and shared experts keep theirs.

    Raises:
        ConfigError: the folder's model does not fit, or forge-ckpt, which reads it, is not installed.
    """
    moe, table = session.config[MoeConfig], session.config[ModelConfig]
    opened, fill = _opened(session, str(moe.upcycle_from))
    _check(opened, table, moe)
    layers = moe_layers(model)
    coverage = fill(model, opened.weights, opened.where, unknown=opened.unknown, partial=True)
    prefixes = tuple(f"{global_name(name)}." for name, _ in layers)
    strange = [n for n in (*coverage.missing, *coverage.unexpected) if not n.startswith(prefixes)]
    if strange:
        raise ForgeError(f"moe.upcycle_from: {opened.where} does not fit the model: {', '.join(strange[:8])}")
    seed = session.config[TrainConfig].seed
    for name, layer in layers:
        _fill_layer(global_name(name), layer, opened.weights, moe.upcycle_noise, seed)
    return model


def _opened(session: TrainingSession, place: str) -> tuple[Any, Any]:
    """The folder, and the function that fills a model from one."""
    try:
        from forge_ckpt.hf.opening import open_model
        from forge_ckpt.hf.start import fill
    except ImportError as error:
        hint = "pip install forge-ckpt"
        raise ConfigError(
            [Problem("moe.upcycle_from", "forge-ckpt reads folders of weights", hint)]
        ) from error
    from forge_core.plugins import Plugins

    plugins = Plugins(installed=session.plugins.installed, blocked=session.plugins.blocked)
    return open_model(place, plugins=plugins), fill


def _check(opened: Any, table: ModelConfig, moe: MoeConfig) -> None:
    """Refuse a folder with experts of its own, or of another shape.

    Raises:
        ConfigError: names every key.
    """
    from forge_core.model.architectures import differences

    path = "moe.upcycle_from"
    if "moe" in opened.config.plugins:
        raise ConfigError([Problem(path, f"{opened.where} has experts already", "use model.init_from")])
    dense = opened.config[ModelConfig]
    problems = [
        Problem(f"model.{key}", f"{getattr(table, key)!r}, but {opened.where} has {getattr(dense, key)!r}")
        for key in differences(dense, table)
    ]
    if moe.expert_hidden_dim != dense.ffn_hidden_dim:
        message = f"{moe.expert_hidden_dim}, but the MLP in {opened.where} is {dense.ffn_hidden_dim} wide"
        problems.append(Problem("moe.expert_hidden_dim", message, "experts start as copies of it"))
    if problems:
        raise ConfigError(problems)


def _fill_layer(name: str, layer: MoeFFN, weights: Any, noise: float, seed: int) -> None:
    """Copy the MLP of one layer into each of its experts."""
    for own, theirs in SOURCES.items():
        parameter: Tensor | None = getattr(layer.experts, own)
        if parameter is None:
            continue
        dense = weights.read(f"{name}.{theirs}")
        full = dense.to(parameter.dtype).expand(layer.moe.num_experts, *dense.shape)
        hidden = HIDDEN.get(own, 1)
        if noise and hidden is not None:
            fresh = _renewed(name, layer.moe.num_experts, full.shape[hidden], noise, seed)
            whole: Any = parameter.detach()
            initial = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
            shape = [1 if dim not in (0, hidden) else full.shape[dim] for dim in range(full.ndim)]
            full = torch.where(fresh.view(shape), initial.cpu(), full)
        copy_full_into(parameter.data, full.contiguous())


def _renewed(name: str, experts: int, hidden: int, share: float, seed: int) -> Tensor:
    """(E, F) bool, the hidden units of each expert that start anew; the same for all matrices of a layer."""
    generator = generator_for(seed, f"{name}.upcycle")
    order = torch.rand(experts, hidden, generator=generator).argsort(-1)
    return order < round(share * hidden)
