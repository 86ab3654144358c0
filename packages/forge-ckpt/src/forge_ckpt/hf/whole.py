"""The whole of a model of which a checkpoint holds a part, and modules that are exported as others."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from forge_ckpt.errors import RequestError
from forge_ckpt.hf.opening import Opened, open_model
from forge_ckpt.hf.start import names_of
from forge_ckpt.hf.weights import Info, Weights
from forge_core.config.tables import ModelConfig
from forge_core.data.wording import counted
from forge_core.errors import ForgeError
from forge_core.loop.naming import global_name
from forge_core.plugins import Plugins


def completed(opened: Opened) -> Opened:
    """With what a checkpoint leaves out (`Alias.saved`), from the folder that its run started from.

    Raises:
        RequestError: that folder cannot be opened.
    """
    start = opened.config[ModelConfig].init_from
    if opened.kind != "checkpoint" or start is None:
        return opened
    have = set(opened.weights.names())
    with described(opened) as model:
        lacking = [first for first, names in names_of(model).items() if have.isdisjoint(names)]
    if not lacking:
        return opened
    # a set of its own: opening a folder settles which plugins answer for its configuration
    plugins = Plugins(installed=opened.plugins.installed, blocked=opened.plugins.blocked)
    try:
        base = open_model(start, plugins=plugins).weights
    except ForgeError as error:
        raise RequestError(
            f"{opened.where} leaves out {counted(len(lacking), 'tensor')}, to be had from "
            f"model.init_from = {start}: {error.message}",
            error.hint,
        ) from error
    there = set(base.names())
    return attrs.evolve(opened, weights=Laid(opened.weights, base, [n for n in lacking if n in there]))


def folded(opened: Opened) -> Opened:
    """With what modules are exported as (`forge_export`) in place of their own parameters."""
    if opened.kind != "checkpoint":
        return opened
    with described(opened) as model:
        modules = {
            global_name(path): copy.deepcopy(module).to("meta")
            for path, module in model.named_modules()
            if callable(getattr(module, "forge_export", None))
        }
        return attrs.evolve(opened, weights=Folded(opened.weights, modules)) if modules else opened


@contextmanager
def described(opened: Opened) -> Iterator[nn.Module]:
    """The folder's model on the meta device."""
    from contextlib import ExitStack

    from forge_core.loop.build import new_session
    from forge_core.loop.inference import build_for_inference, for_one_process

    with ExitStack() as stack:
        session = new_session(for_one_process(opened.config), opened.plugins, stack)
        yield build_for_inference(session, memory=False).model


class Laid:
    """Weights over others, of which `names` are taken."""

    def __init__(self, over: Weights, under: Weights, names: Sequence[str]) -> None:
        self._over, self._names = over, list(over.names())
        self._under = dict.fromkeys(names, under)

    def names(self) -> Sequence[str]:
        return [*self._names, *self._under]

    def info(self, name: str) -> Info:
        return self._under.get(name, self._over).info(name)

    def read(self, name: str) -> Tensor:
        return self._under.get(name, self._over).read(name)


class Folded:
    """Weights in which some modules stand as what they are exported as.

    Args:
        source: the weights. modules: by path, on the meta device.
    """

    def __init__(self, source: Weights, modules: Mapping[str, Any]) -> None:
        self._source, self._modules = source, modules
        self._owner: dict[str, str] = {}
        self._left_out: set[str] = set()
        self._shapes: dict[str, tuple[int, ...]] = {}
        for path, module in modules.items():
            made = {f"{path}.{name}": tensor for name, tensor in module.forge_export().items()}
            self._left_out |= {f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)}
            self._owner |= dict.fromkeys(made, path)
            self._shapes |= {name: tuple(tensor.shape) for name, tensor in made.items()}

    def names(self) -> Sequence[str]:
        return [*(name for name in self._source.names() if name not in self._left_out), *self._owner]

    def info(self, name: str) -> Info:
        if name not in self._owner:
            return self._source.info(name)
        path = self._owner[name]
        parts = self._modules[path].named_parameters(recurse=False)
        return Info(self._source.info(f"{path}.{next(parts)[0]}").dtype, self._shapes[name])

    @torch.no_grad()
    def read(self, name: str) -> Tensor:
        if name not in self._owner:
            return self._source.read(name)
        path = self._owner[name]
        module: Any = copy.deepcopy(self._modules[path])
        for own, _ in list(module.named_parameters(recurse=False)):
            value = self._source.read(f"{path}.{own}")
            setattr(module, own, nn.Parameter(value, requires_grad=value.is_floating_point()))
        made: Tensor = module.forge_export()[name.removeprefix(f"{path}.")]
        return made.detach()
