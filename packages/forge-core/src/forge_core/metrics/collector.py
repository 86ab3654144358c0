"""All metrics of a log step in one reduction over ranks and one read from the device.

Every read of a device tensor makes the host wait for the device, and every collective makes the ranks wait
for each other. So whatever plugins measure is packed into one vector: sums lie side by side, and for a
maximum each rank has a slot of its own that the others leave at zero, so that adding up gathers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from forge_core.contract import Metric
from forge_core.errors import ForgeError

OPS = ("sum", "max", "min", "ratio")
Op = Literal["same", "sum", "max", "min", "ratio", "where"]
Number = Tensor | float
Value = Number | tuple[Number, Number] | None


@attrs.frozen
class Reading:
    """One value of this rank: a number, a pair (numerator, denominator) for "ratio", None if it has none."""

    name: str
    op: Op
    value: Value


class MetricCollector:
    """Reads, reduces and reads back the metrics of a log step.

    Args:
        metrics: what plugins measure; the same list in the same order on every rank.
        device: where values are packed. Sums are carried in fp64, or fp32 where the device has no fp64.
        group: the ranks to reduce over; None for one process, where nothing is reduced.
        counts: whether sums of this rank count; False where they are copies of a peer's (tensor parallel).

    Raises:
        ForgeError: two metrics of one name, or an unknown op.
    """

    def __init__(
        self,
        metrics: Sequence[Metric],
        *,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
        counts: bool = True,
    ) -> None:
        self.metrics = tuple(metrics)
        self.device = torch.device(device)
        self.dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self.group = group
        self.world = 1 if group is None else group.size()
        self.counts = counts
        self.finishes = {m.name: m.finish for m in self.metrics if m.finish is not None}
        _check(self.metrics)

    def collect(
        self,
        values: Mapping[str, Number] | None = None,
        sums: Mapping[str, Number | tuple[Number, Number]] | None = None,
        maxima: Mapping[str, Number] | None = None,
        locate: Mapping[str, Number] | None = None,
    ) -> dict[str, float]:
        """The numbers of this step over all ranks, the same on each; one collective and one device read.

        Args:
            values: already the same on every rank (the global loss, the norm); not reduced.
            sums: this rank's share of a sum, or a pair (numerator, denominator) of a ratio of sums.
            maxima: this rank's number, of which the largest is wanted.
            locate: this rank's number, of which it is wanted which rank has the largest.

        Tensors are 0-d, of any dtype; host numbers are welcome. Every rank passes the same names. Left out of
        the result: a metric that is None on every rank, and a ratio whose denominators add up to 0. A rank
        whose metric is None takes no part in it. NaN on one rank gives NaN.
        """
        with torch.no_grad():
            readings = list(self._readings(values or {}, sums or {}, maxima or {}))
            readings += [Reading(name, "where", number) for name, number in (locate or {}).items()]
            if self.world == 1:
                readings = [_alone(r) for r in readings if r.value is not None]
                numbers = self._read([*_flat(_addends, readings), *_same(readings)])
            else:
                numbers = self._pack(readings).tolist()
        return {
            name: self.finishes[name](number) if name in self.finishes else number
            for name, number in self._unpack(readings, numbers)
        }

    def _readings(
        self, values: Mapping[str, Number], sums: Mapping[str, Any], maxima: Mapping[str, Number]
    ) -> Iterator[Reading]:
        for name, value in values.items():
            yield Reading(name, "same", value)
        for name in sorted(sums):  # ranks may have filled the mapping in another order
            share = sums[name] if self.counts else None
            yield Reading(name, "ratio" if isinstance(sums[name], tuple) else "sum", share)
        for name in sorted(maxima):
            yield Reading(name, "max", maxima[name])
        for metric in self.metrics:
            read = metric.read()
            if not self.counts and metric.op in ("sum", "ratio"):
                read = None  # a peer has read the same
            yield Reading(metric.name, metric.op, read)  # type: ignore[arg-type]

    def _read(self, numbers: Sequence[Number]) -> list[float]:
        """As they are here. What the host knows does not go to the device and back."""
        tensors = [n if n.ndim == 0 else n.reshape(()) for n in numbers if isinstance(n, Tensor)]
        if not tensors:
            return [float(n) for n in numbers]
        first = tensors[0]
        if any(t.dtype is not first.dtype or t.device != first.device for t in tensors):
            tensors = [self._scalar(t) for t in tensors]
        read = iter(torch.stack(tensors).tolist())
        return [float(next(read) if isinstance(n, Tensor) else n) for n in numbers]

    def _pack(self, readings: Sequence[Reading]) -> Tensor:
        """(K,) numbers on the device, reduced: all sums, all extremes, then what needs no reduction."""
        sums = [self._scalar(number) for number in _flat(_addends, readings)]
        extremes = [self._scalar(number) for number in _flat(_extremes, readings)]
        same = [self._scalar(number) for number in _same(readings)]
        if not (sums or extremes):
            return torch.stack(same) if same else torch.empty(0)
        n, m = len(sums), len(extremes)
        vector = torch.zeros(n + self.world * m, dtype=self.dtype, device=self.device)
        if sums:
            vector[:n] = torch.stack(sums)
        if extremes:
            assert self.group is not None
            start = n + self.group.rank() * m
            vector[start : start + m] = torch.stack(extremes)
        dist.all_reduce(vector, group=self.group)
        located = sum(r.op == "where" for r in readings)
        parts = [vector[:n]]
        if m:
            grid = vector[n:].view(self.world, m)
            top = grid.amax(0)
            parts += [torch.cat([top[: m - located], grid[:, m - located :].argmax(0).to(top.dtype)])]
        return torch.cat([*parts, torch.stack(same)]) if same else torch.cat(parts)

    def _scalar(self, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().to(self.device, self.dtype, non_blocking=True).reshape(())
        return torch.full((), value, dtype=self.dtype, device=self.device)

    @staticmethod
    def _unpack(readings: Sequence[Reading], numbers: Sequence[float]) -> Iterator[tuple[str, float]]:
        sums = iter(numbers)
        extremes = iter(numbers[sum(len(_addends(r)) for r in readings) :])
        tail = sum(r.op == "same" for r in readings)
        same = iter(numbers[len(numbers) - tail :])
        for r in readings:
            if r.op == "same":
                yield r.name, next(same)
            elif r.op in ("max", "min", "where"):
                number = next(extremes)
                if number != -float("inf"):
                    yield r.name, -number if r.op == "min" else number
            else:
                top, bottom = next(sums), next(sums)
                if r.op == "sum" and bottom != 0:
                    yield r.name, top
                elif r.op == "ratio" and bottom != 0:
                    yield r.name, top / bottom


def _alone(reading: Reading) -> Reading:
    """On one process only a ratio is more than its own value, and rank 0 has the largest."""
    if reading.op == "where":
        return Reading(reading.name, "same", 0.0)
    return reading if reading.op == "ratio" else Reading(reading.name, "same", reading.value)


def _flat(what: Callable[[Reading], tuple[Any, ...]], readings: Sequence[Reading]) -> list[Any]:
    return [number for reading in readings for number in what(reading)]


def _same(readings: Sequence[Reading]) -> list[Any]:
    return [reading.value for reading in readings if reading.op == "same"]


def _addends(reading: Reading) -> tuple[Any, ...]:
    """A sum travels with the number of ranks that have one, a ratio with its denominator."""
    if reading.op == "sum":
        return (0.0, 0.0) if reading.value is None else (reading.value, 1.0)
    if reading.op == "ratio":
        return (0.0, 0.0) if reading.value is None else tuple(reading.value)  # type: ignore[arg-type]
    return ()


def _extremes(reading: Reading) -> tuple[Any, ...]:
    """A minimum is the maximum of the negated numbers; a rank without one never wins."""
    if reading.op not in ("max", "min", "where"):
        return ()
    value: Any = reading.value
    return (-float("inf") if value is None else -value if reading.op == "min" else value,)


def _check(metrics: Sequence[Metric]) -> None:
    seen: set[str] = set()
    for metric in metrics:
        if metric.op not in OPS:
            raise ForgeError(f"metric {metric.name}: unknown op {metric.op!r}", f"one of {', '.join(OPS)}")
        if metric.name in seen:
            raise ForgeError(
                f"two metrics are called {metric.name}", "metrics carry their plugin's name: NAME/..."
            )
        seen.add(metric.name)
