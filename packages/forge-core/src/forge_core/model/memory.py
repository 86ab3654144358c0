"""From the meta device to memory, with nothing left as it came from the allocator."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from forge_core.errors import ForgeError
from forge_core.loop.naming import global_name as unwrapped_name
from forge_core.model.init import GlobalName, initialise


def materialise(
    model: nn.Module,
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    *,
    seed: int,
    std: float,
    n_layers: int,
    verify: bool = True,
    global_name: GlobalName = unwrapped_name,
) -> None:
    """Give `model` memory on `device` and its initial values (see `initialise`).

    Parameters that were shared stay shared.

    Args:
        dtype: fp64 turns the whole model to fp64; otherwise modules keep the precision they were built with.
        seed, std, n_layers, global_name: see `initialise`.
        verify: fill the memory with NaN first and look for it afterwards; two passes, cheap beside drawing.

    Raises:
        ForgeError: nothing says how a parameter or buffer starts, or (with `verify`) it was not filled.
    """
    if dtype == torch.float64:
        model.to(dtype)
    shared = shared_names(model)
    model.to_empty(device=device)
    tie(model, shared)
    if verify:
        poison(model)
    initialise(model, seed, std, n_layers, global_name=global_name)
    if verify:
        check_filled(model)


def shared_names(model: nn.Module) -> list[list[str]]:
    """Names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def tie(model: nn.Module, groups: list[list[str]]) -> None:
    """Make parameters one again that moving or sharding has made separate: `groups` of `shared_names`."""
    for first, *others in groups:
        parameter = model.get_parameter(first)
        for name in others:
            path, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(path), attribute, parameter)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer by name, a DTensor by its local part."""
    for found in (model.named_parameters(), model.named_buffers()):
        for name, tensor in found:
            yield name, tensor.to_local() if hasattr(tensor, "to_local") else tensor


@torch.no_grad()
def poison(model: nn.Module) -> None:
    """Fill every tensor with a value that no initialisation gives: NaN, or the least integer."""
    for _, tensor in _tensors(model):
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(torch.nan)
        elif tensor.dtype != torch.bool:
            tensor.fill_(torch.iinfo(tensor.dtype).min)


@torch.no_grad()
def check_filled(model: nn.Module) -> None:
    """Look for what `poison` left.

    Raises:
        ForgeError: names every tensor that still holds it.
    """
    missed = [name for name, tensor in _tensors(model) if bool(_poisoned(tensor).any())]
    if missed:
        raise ForgeError(f"initialisation missed {', '.join(missed)}", "fill it in forge_reset, or mark it")


def _poisoned(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.isnan()
    if tensor.dtype == torch.bool:
        return torch.zeros((), dtype=torch.bool)
    # zero is the least value of an unsigned type, and a value like any other
    least = torch.iinfo(tensor.dtype).min
    return tensor == least if least < 0 else torch.zeros((), dtype=torch.bool)
