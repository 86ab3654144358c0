"""A model cut into parts by what it says of itself (`SplitSpec`), and this rank's parts as one module."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor, nn

from forge_core.contract import SplitSpec
from forge_core.errors import ConfigError, Problem
from forge_core.loop.naming import PART
from forge_core.model import mark

if TYPE_CHECKING:
    from forge_pp.whole import Whole


@attrs.frozen
class Cut:
    """Where a model is cut.

    Attributes:
        begins: number of the first block of each stage, from 0.
        blocks: names of all blocks in order.
    """

    begins: tuple[int, ...]
    blocks: tuple[str, ...]

    def of_stage(self, stage: int) -> tuple[str, ...]:
        """Names of the blocks of a stage."""
        return self.blocks[self.begins[stage] : (*self.begins, len(self.blocks))[stage + 1]]

    @property
    def stages(self) -> int:
        """How many there are."""
        return len(self.begins)


def spec_of(model: nn.Module) -> SplitSpec:
    """What the model says of how it splits.

    Raises:
        ConfigError: it says nothing.
    """
    split = getattr(model, "split", None)
    spec = split() if callable(split) else None
    if not isinstance(spec, SplitSpec):
        kind = type(model).__name__
        raise ConfigError([Problem("pp.size", f"{kind} does not say how it splits into stages: no split()")])
    return spec


def stage_part(model: nn.Module, cut: Cut, stage: int) -> nn.Module:
    """The part of `model` (on the meta device) that a stage runs; what it keeps is the model's own, no copy.

    Missing modules are None. A tied parameter that the part needs stays under the name that it has in the
    whole model: the last stage keeps the embedding for the head that shares its weight.
    """
    spec = spec_of(model)
    first, last = stage == 0, stage == cut.stages - 1
    keep = set(cut.of_stage(stage))
    part = _opened(model, (*spec.entry, spec.blocks, *spec.exit))
    parent, _, name = spec.blocks.rpartition(".")
    blocks: Any = model.get_submodule(spec.blocks)
    kept = nn.ModuleDict({key: block for key, block in blocks.items() if key in keep})
    part.get_submodule(parent)._modules[name] = kept
    for there, names in ((first, spec.entry), (last, spec.exit)):
        for path in names if not there else ():
            if not (last and _shared(path, spec.exit, spec.tied)):
                _set_none(part, path)
    for place in ("", spec.blocks.rpartition(".")[0]):
        part.get_submodule(place).__dict__.update(first=first, last=last)
    return part


def _opened(model: nn.Module, paths: Sequence[str]) -> nn.Module:
    """A copy of the modules that lead to `paths`; everything else is shared with `model`."""
    part = _shallow(model)
    opened = {""}
    for path in paths:
        steps = path.split(".")[:-1]
        for i in range(len(steps)):
            place = ".".join(steps[: i + 1])
            if place not in opened:
                opened.add(place)
                parent = part.get_submodule(".".join(steps[:i]))
                parent._modules[steps[i]] = _shallow(part.get_submodule(place))
    return part


def _shallow(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    for name, value in module.__dict__.items():
        if isinstance(value, dict):  # submodules, parameters, hooks, marks
            twin.__dict__[name] = copy.copy(value)
    return twin


def _set_none(part: nn.Module, path: str) -> None:
    parent, _, name = path.rpartition(".")
    part.get_submodule(parent)._modules[name] = None


def _shared(entry: str, leaving: Sequence[str], tied: Sequence[Sequence[str]]) -> bool:
    """Whether a module at the entry owns a parameter that one at the exit uses, too."""

    def owns(group: Sequence[str], place: str) -> bool:
        return any(name.startswith(f"{place}.") for name in group)

    return any(owns(group, entry) and any(owns(group, place) for place in leaving) for group in tied)


class StagedModel(nn.Module):
    """The parts of this rank as one module, whose parameters have the names of the whole model.

    Attributes:
        stages: number of the stage that each part runs, ascending.
        parts: the parts, in that order.
        whole_names: names of all parameters of the whole model.
        whole_state, whole_size: names of all that checkpoints keep of it, and how many parameters it has.
        tied: names of the parameters that the first and the last stage share; empty where one rank has both.
    """

    whole: Whole

    def __init__(self, parts: dict[int, nn.Module], whole: nn.Module, tied: Sequence[str] = ()) -> None:
        super().__init__()
        self.stages = tuple(sorted(parts))
        for number, stage in enumerate(self.stages):
            self.add_module(f"{PART}{number}", parts[stage])
        self.whole_names = tuple(name for name, _ in whole.named_parameters())
        self.whole_state = tuple(whole.state_dict())
        self.whole_size = sum(parameter.numel() for parameter in whole.parameters())
        self.tied = tuple(tied)

    @property
    def parts(self) -> tuple[nn.Module, ...]:
        return tuple(self._modules[f"{PART}{i}"] for i in range(len(self.stages)))  # type: ignore[misc]

    @property
    def config(self) -> Any:
        """The `[model]` table of the decoder."""
        part: Any = self.parts[0]
        return part.config

    @property
    def text_part(self) -> nn.Module:
        """Where weights of a text model go: in what the parts call so, where they do."""
        inner = [getattr(part, "text_part", None) for part in self.parts]
        if not all(isinstance(module, nn.Module) for module in inner):
            return self
        texts = nn.Module()
        for number, module in enumerate(inner):
            texts.add_module(f"{PART}{number}", module)
        return texts

    def forward(self, tokens: Tensor, *, cache: Any = None, **given: Any) -> Tensor:
        """The whole model, see `Whole`; called by all ranks of a pipeline."""
        return self.whole(tokens, cache, given)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Whole`."""
        return self.whole.logits(hidden)

    def new_cache(self, *arguments: Any) -> Any:
        """See `Whole`."""
        return self.whole.new_cache(*arguments)


def staged(model: nn.Module, cut: Cut, stages: Sequence[int]) -> StagedModel:
    """The model of a rank that has these stages.

    Raises:
        ConfigError: a parameter belongs to no block, neither to the entry nor to the exit.
    """
    spec = spec_of(model)
    names = [name for name, _ in model.named_parameters()]
    places = (*spec.entry, spec.blocks, *spec.exit)
    stray = [name for name in names if not name.startswith(tuple(f"{place}." for place in places))]
    if stray:
        message = f"parameter {stray[0]} of {type(model).__name__} belongs to no stage"
        raise ConfigError([Problem("pp.size", message, "its split() names it in entry, blocks or exit")])
    parts = {stage: stage_part(model, cut, stage) for stage in stages}
    ends = {0, cut.stages - 1}
    tied = [group[0] for group in spec.tied if _spans(group, spec)] if len(ends) == 2 else []
    apart = tied if not ends <= set(stages) else []
    for name in apart if ends & set(stages) else ():
        owner, _, parameter = name.rpartition(".")
        for stage in ends & set(stages):
            mark(parts[stage].get_submodule(owner), parameter, copies=2)
    return StagedModel(parts, model, apart if ends & set(stages) else ())


def _spans(group: Sequence[str], spec: SplitSpec) -> bool:
    entry, leaving = (tuple(f"{place}." for place in places) for places in (spec.entry, spec.exit))
    return any(n.startswith(entry) for n in group) and any(n.startswith(leaving) for n in group)
