"""Losses that are born inside a forward: attached to a tensor on its way, and added to the objective by it.

The objective needs no list of them and no path to its top: a tensor that carries an attached loss hands that
loss its gradient in the backward. So it works under activation checkpointing, in compiled blocks, and where
the forward is cut into pieces that run elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_active: AttachedLosses | None = None


class Divided:
    """Whether what a loss is attached to now is a part of the tokens, of which other ranks have the others.

    Sequence parallel says so, between mixers. A value made of such tokens is a part of a sum, though these
    ranks otherwise have the same loss.

    Attributes:
        now: whether it is.
        group: the ranks that have the other parts.
    """

    now = False
    group: ProcessGroup | None = None

    def __init__(self) -> None:
        self._outside: list[bool] = []

    def begin(self, now: bool, group: ProcessGroup | None) -> None:
        """A forward starts, whatever became of the last one."""
        self.now, self.group = now, group
        self._outside.clear()

    def enter(self) -> None:
        """A module starts that sees all tokens."""
        self._outside.append(self.now)
        self.now = False

    def leave(self) -> None:
        """It is done."""
        if self._outside:
            self.now = self._outside.pop()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """A step of a session, which neither knows what forwards outside of it left behind nor leaves
        anything to them."""
        before = self.now, self.group, self._outside
        self.now, self.group, self._outside = False, None, []
        try:
            yield
        finally:
            self.now, self.group, self._outside = before


divided = Divided()


def attach_loss(tensor: Tensor, value: Tensor, name: str, per: str = "tokens") -> Tensor:
    """Add `value / global count of per` to the objective and return `tensor` unchanged.

    Outside of a training step, and without gradients, nothing is added. Use what is returned: the value takes
    effect when a gradient flows back through it, so attach it to a tensor that the loss depends on, rather to
    a small one made inside a block (weights of a gate) than to the block's output.

    Args:
        tensor: any floating tensor with or without a gradient.
        value: () a sum over this micro-batch, already weighted.
        name: for metrics; one name may be used by many layers, whose values add up.
        per: key of `Forward.count`, what the sum is divided by ("tokens", "sequences", ...).

    Raises:
        ValueError: `value` is no scalar, or `name` was used with another `per`.
        KeyError: the forward does not count `per`.
    """
    attached = _active
    if attached is None or not torch.is_grad_enabled():
        return tensor
    if value.ndim:
        raise ValueError(f"attached loss {name!r}: {tuple(value.shape)} is no sum; its shape must be ()")
    scale = attached.scale(name, per)
    total = attached.part(name, per) if divided.now else attached.total(name, per)
    if torch.compiler.is_compiling():
        _add_in_forward(total, value.detach())
    elif _in_forward():
        total.add_(value.detach())
    attachment: Tensor = _Attach.apply(tensor, value, scale)  # type: ignore[no-untyped-call]
    return attachment


class AttachedLosses:
    """What a session knows of attached losses: their scales and, without a graph, what they added up to.

    Scales and sums are () tensors that stay the same objects from step to step, so that compiled code that
    uses them is compiled once. They are fp64 where the device has it.

    Args:
        device: where the model computes.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._dtype = torch.float32 if self.device.type == "mps" else torch.float64
        self._scales: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._factor: float | Tensor = 1.0
        self._sums: dict[str, Tensor] = {}
        self._parts: dict[str, Tensor] = {}
        self._group: ProcessGroup | None = None
        self._pending = False
        self._per: dict[str, str] = {}

    def begin_step(self, counts: Mapping[str, int], factor: float | Tensor = 1.0) -> None:
        """Set what the values of this step are divided by, and forget those of the last.

        Args:
            counts: global counts of the step by key.
            factor: what every gradient of the step is multiplied by besides: the number of ranks that it is
                averaged over, a loss scale; a number or a () tensor.
        """
        for total in (*self._sums.values(), *self._parts.values()):
            total.zero_()
        self._pending = bool(self._parts)
        if not isinstance(factor, Tensor) and (counts, factor) == (self._counts, self._factor):
            return
        self._counts, self._factor = dict(counts), factor
        for per, count in counts.items():
            if per not in self._scales:
                self._scales[per] = torch.zeros((), dtype=self._dtype, device=self.device)
            if isinstance(factor, Tensor):
                self._scales[per].copy_(factor).div_(max(count, 1))
            else:
                self._scales[per].fill_(factor / max(count, 1))

    @contextmanager
    def activate(self) -> Iterator[None]:
        """While active, `attach_loss` attaches; around forwards and their backwards, which may recompute."""
        global _active
        before, _active = _active, self
        try:
            with divided.apart():
                yield
        finally:
            _active = before

    def _settle(self) -> None:
        """Add up over ranks the values made of a part of their tokens (`Divided`): one reduction a step,
        where there are any."""
        if not self._pending:
            return
        self._pending = False
        names = sorted(self._parts)
        parts = torch.stack([self._parts[name] for name in names])
        torch.distributed.all_reduce(parts, group=self._group)
        for name, value in zip(names, parts, strict=True):
            self._sums[name].add_(value)

    def totals(self) -> dict[str, Tensor]:
        """By name, () what this rank added to the objective in this step: sum of values / global count.

        To be asked for after the last forward of a step, first on all ranks: values made of a part of the
        tokens (sequence parallel) are added up over those that have the other parts.
        """
        self._settle()
        return {
            name: total / max(self._counts.get(self._per[name], 1), 1) for name, total in self._sums.items()
        }

    def sums(self) -> dict[str, Tensor]:
        """By name, () the plain sum of the values of this step on this rank; asked for like `totals`."""
        self._settle()
        return {name: total.clone() for name, total in self._sums.items()}

    def scale(self, name: str, per: str) -> Tensor:
        """() what the values of `name` are multiplied by."""
        if per not in self._scales:
            known = ", ".join(sorted(self._scales)) or "nothing"
            raise KeyError(f"attached loss {name!r} is per {per!r}, but the forward counts {known}")
        return self._scales[per]

    def declare(self, name: str, per: str = "tokens") -> None:
        """Make room for the values of `name` before its first use.

        Nobody needs it; but compiled code is compiled a second time when a name turns up in it, and with
        activation checkpointing inside of what is compiled it is then not compiled at all.
        """
        if name not in self._sums:
            self._sums[name] = torch.zeros((), dtype=self._dtype, device=self.device)
            self._per[name] = per

    def total(self, name: str, per: str) -> Tensor:
        """() where the values of `name` are summed."""
        self.declare(name, per)
        if self._per[name] != per:
            raise ValueError(f"attached loss {name!r} is per {self._per[name]!r} and per {per!r}")
        return self._sums[name]

    def part(self, name: str, per: str) -> Tensor:
        """() where the values of `name` are summed that are made of a part of the tokens."""
        total = self.total(name, per)
        if name not in self._parts:
            self._parts[name], self._group = torch.zeros_like(total), divided.group
            self._pending = True
        return self._parts[name]


class _Attach(torch.autograd.Function):
    """Returns the tensor; in the backward, gives `value` the gradient `scale`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, value: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        ctx.dtype = value.dtype
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (scale,) = ctx.saved_tensors
        return gradient, scale.to(ctx.dtype), None


def _in_forward() -> bool:
    """False while a backward recomputes a forward that was counted already."""
    return torch._C._current_graph_task_id() == -1


@torch.library.custom_op("forge::add_in_forward", mutates_args=("total",))
def _add_in_forward(total: Tensor, value: Tensor) -> None:
    """`total += value` in compiled code, which cannot ask while it is traced where it will run."""
    if _in_forward():
        total.add_(value)


@_add_in_forward.register_fake
def _(total: Tensor, value: Tensor) -> None:
    return None
