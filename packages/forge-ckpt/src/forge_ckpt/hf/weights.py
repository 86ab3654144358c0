"""Named tensors that are read one at a time, whatever they lie in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import attrs
import torch
from torch import Tensor

from forge_ckpt.hf.apply import to_ours, to_theirs
from forge_ckpt.hf.units import Unit, Units, find_units
from forge_core.contract import TensorRule


@attrs.frozen
class Info:
    """dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Weights(Protocol):
    """Tensors by name, in an order."""

    def names(self) -> Sequence[str]: ...

    def info(self, name: str) -> Info:
        """What a tensor is like, without reading it. KeyError: there is none."""
        ...

    def read(self, name: str) -> Tensor:
        """A whole tensor on the CPU; it may share memory with a file and must not be written to."""
        ...


class InMemory:
    """Weights that are there: a state dict, DTensors gathered when asked for (all ranks must ask then)."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> Sequence[str]:
        return list(self.tensors)

    def info(self, name: str) -> Info:
        tensor = self.tensors[name]
        return Info(tensor.dtype, tuple(tensor.shape))

    def read(self, name: str) -> Tensor:
        tensor = self.tensors[name]
        full = getattr(tensor, "full_tensor", None)
        return (tensor if full is None else full()).detach().cpu()


class Converted:
    """Weights under the names of the other side.

    Args:
        source: the weights. rules: of the architecture.
        theirs: `source` has their names and this ours; False: the other way round.
        ignored: patterns of names of the source that are left out.

    Attributes:
        unknown: names of the source that no rule has.
    """

    def __init__(
        self, source: Weights, rules: Sequence[TensorRule], *, theirs: bool, ignored: Iterable[str] = ()
    ) -> None:
        self.source, self.theirs = source, theirs
        self.units: Units = find_units(rules, source.names(), theirs=theirs, ignored=tuple(ignored))
        self.unknown = self.units.unknown
        self._found = self.units.by_ours if theirs else self.units.by_theirs
        self._last: tuple[Unit, list[Tensor]] | None = None

    def names(self) -> Sequence[str]:
        return list(self._found)

    def missing(self) -> list[str]:
        """Names of the source that a unit needs and the source does not have."""
        have = set(self.source.names())
        needed = self.units.by_theirs if self.theirs else self.units.by_ours
        return [name for name in needed if name not in have]

    def info(self, name: str) -> Info:
        unit = self._found[name]
        infos = [self.source.info(n) for n in self._inputs(unit)]
        empty = [torch.empty(i.shape, dtype=i.dtype, device="meta") for i in infos]
        tensor = self._apply(unit, empty)[self._outputs(unit).index(name)]
        return Info(tensor.dtype, tuple(tensor.shape))

    def read(self, name: str) -> Tensor:
        """One tensor; what came out beside it is kept until another unit is asked for."""
        unit = self._found[name]
        if self._last is None or self._last[0] is not unit:
            self._last = None
            self._last = unit, self._apply(unit, [self.source.read(n) for n in self._inputs(unit)])
        return self._last[1][self._outputs(unit).index(name)]

    def _apply(self, unit: Unit, tensors: list[Tensor]) -> list[Tensor]:
        return (to_ours if self.theirs else to_theirs)(unit.rule, tensors)

    def _inputs(self, unit: Unit) -> tuple[str, ...]:
        return unit.theirs if self.theirs else unit.ours

    def _outputs(self, unit: Unit) -> tuple[str, ...]:
        return unit.ours if self.theirs else unit.theirs
