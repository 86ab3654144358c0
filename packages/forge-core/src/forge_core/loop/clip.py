"""The one global gradient norm, which counts each distinct parameter once, and clipping by it.

Neither waits for the host. In one process the norm is torch's own; over several it costs one all-reduce of a
few numbers, which carries whatever else the step has to add up over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from forge_core.model.roles import mark_of
from forge_core.optim.tensors import is_sharded, local

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from forge_core.contract import MeshAxis


class Axes(Protocol):
    """What the norm needs to know of a mesh; `session.mesh` has it."""

    @property
    def axes(self) -> Sequence[MeshAxis]: ...

    def size(self, name: str, /) -> int: ...


class GlobalNorm:
    """The L2 norm of all gradients of all ranks as one vector, and sums over ranks beside it.

        norm = GlobalNorm(model, mesh, world_size=dist.get_world_size())
        total, [loss] = norm([p for p in parameters if p.grad is not None], [local_loss_sum])

    Each rank adds up the squares of what it holds, divided by the number of ranks that hold the same numbers;
    one all-reduce over all ranks sums them. How many those are is known from a parameter's own layout: the
    sharded dimensions of a DTensor, the mesh axes along which all parameters differ (those not carved from a
    data axis), and `mark(..., axes, copies)`. So it holds for any mix of plain tensors and DTensors on
    different meshes.

    Args:
        model: owner of the parameters, for their marks; parameters it does not have count as unmarked.
        mesh: None in one process.
        world_size: of `group`.
        group: all ranks of the run; None is the default group.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        mesh: Axes | None = None,
        *,
        world_size: int = 1,
        group: ProcessGroup | None = None,
    ) -> None:
        self.world_size, self.group = world_size, group
        apart = [] if mesh is None else [a for a in mesh.axes if a.params_differ and a.carved_from is None]
        self.differ = math.prod(axis.size for axis in apart)
        self.weights: dict[int, float] = {}
        if world_size > 1 and model is not None:
            self.weights = self._marked(model, mesh)

    def __call__(
        self,
        parameters: Sequence[Tensor],
        sums: Sequence[Tensor] = (),
        *,
        holders: float | Sequence[float] = 1.0,
    ) -> tuple[Tensor, list[Tensor]]:
        """The norm over the gradients of `parameters`, and `sums` added up over ranks.

        Called by every rank at the same point, whatever gradients it has. Gradients that are still partial
        sums over tensor ranks are settled here first (in place).

        Args:
            parameters: those with a gradient, each once.
            sums: () tensors, one rank's share of a sum each.
            holders: ranks that pass the same share of a sum (tensor ranks compute the same loss), one number
                for all sums or one for each.

        Returns:
            () the norm in fp32 (fp64 for fp64 gradients), and the sums in their own dtypes; the same on all
            ranks. An infinity or a NaN of any rank arrives on all.
        """
        if self.world_size == 1:
            return global_norm([p.grad for p in parameters if p.grad is not None]), list(sums)
        settle_gradients(parameters)
        device = _device(parameters, sums)
        wide = torch.float32 if device.type == "mps" else torch.float64
        shares = [holders] * len(sums) if isinstance(holders, (int, float)) else list(holders)
        parts = [s.detach().to(device, wide) / h for s, h in zip(sums, shares, strict=True)]
        vector = torch.stack([self._squares(parameters, device, wide), *parts])
        torch.distributed.all_reduce(vector, group=self.group)
        # a rank may have no gradient at all, and must find the same as the others
        exact = any(t.dtype is torch.float64 for t in (*(_gradient(p) for p in parameters), *sums))
        norm = vector[0].sqrt().to(torch.float64 if exact else torch.float32)
        return norm, [vector[i + 1].to(s.dtype) for i, s in enumerate(sums)]

    def weight(self, parameter: Tensor) -> float:
        """1 / number of ranks that hold the same part of this parameter."""
        found = self.weights.get(id(parameter))
        if found is None:
            found = _pieces(parameter) * self.differ / self.world_size
            self.weights[id(parameter)] = found
        return found

    def _squares(self, parameters: Sequence[Tensor], device: torch.device, wide: torch.dtype) -> Tensor:
        """() this rank's share of the sum of squares."""
        by_weight: dict[float, list[Tensor]] = {}
        for parameter in parameters:
            part = local(_gradient(parameter))
            if part.numel():
                by_weight.setdefault(self.weight(parameter), []).append(part)
        total = torch.zeros((), dtype=wide, device=device)
        for weight, parts in by_weight.items():
            norms = torch.stack(torch._foreach_norm(parts, 2.0, dtype=_exact(parts[0].dtype)))
            total = total + norms.to(device, wide).square().sum() * weight
        return total

    def _marked(self, model: nn.Module, mesh: Axes | None) -> dict[int, float]:
        """Weights of the parameters that say themselves along which axes they differ, or how often they
        exist."""
        weights: dict[int, float] = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                said = mark_of(module, name)
                if said.axes or said.copies > 1:
                    more = math.prod(1 if mesh is None else mesh.size(axis) for axis in said.axes)
                    pieces = _pieces(parameter) * self.differ * more
                    weights[id(parameter)] = pieces / said.copies / self.world_size
        return weights


def global_norm(grads: Sequence[Tensor]) -> Tensor:
    """L2 norm over all gradients of this process as one vector, () in fp32 (fp64 for fp64 gradients); 0
    without gradients.

    Low-precision gradients are summed in fp32.
    """
    if not grads:
        return torch.zeros(())
    norms = torch._foreach_norm(list(grads), 2.0, dtype=_exact(grads[0].dtype))
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def clip_(grads: Sequence[Tensor], norm: Tensor, limit: float) -> None:
    """Scale gradients, which have no graph, in place by min(1, limit / norm), the same factor for all,
    DTensors by their local part."""
    if not grads:
        return
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    parts = [local(g) for g in grads] if torch.distributed.is_initialized() else list(grads)
    torch._foreach_mul_(parts, factor.to(grads[0].device))


@torch.no_grad()
def settle_gradients(parameters: Iterable[Tensor]) -> None:
    """Bring every gradient into the layout of its parameter, in place.

    The gradient of a weight that tensor ranks share, from an activation that they split, is each rank's part
    of a sum. All such gradients of one mesh and dtype are added up by one all-reduce.
    """
    waiting: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        grad = parameter.grad
        if grad is None or not is_sharded(grad):
            continue
        found, wanted = cast(Any, grad), cast(Any, parameter)
        if found.placements == wanted.placements:
            continue
        if all(p.is_replicate() for p in wanted.placements) and _only_partial_sums(found.placements):
            dims = tuple(i for i, p in enumerate(found.placements) if p.is_partial())
            waiting.setdefault((found.device_mesh, dims, grad.dtype), []).append(parameter)
        else:
            parameter.grad = found.redistribute(placements=wanted.placements)
    for (mesh, dims, _), owners in waiting.items():
        flat = torch.cat([local(_gradient(p)).reshape(-1) for p in owners])
        for dim in dims:
            torch.distributed.all_reduce(flat, group=mesh.get_group(dim))
        _hand_back(owners, flat)


def _hand_back(owners: Sequence[Tensor], flat: Tensor) -> None:
    from torch.distributed.tensor import DTensor

    parts = torch.split(flat, [p.numel() for p in owners])
    for parameter, part in zip(owners, parts, strict=True):
        spec = cast(Any, parameter)
        parameter.grad = DTensor.from_local(
            part.view(parameter.shape), spec.device_mesh, spec.placements, run_check=False
        )


def _only_partial_sums(placements: Iterable[Any]) -> bool:
    return all(p.is_replicate() or (p.is_partial() and p.reduce_op == "sum") for p in placements)


def _pieces(parameter: Tensor) -> int:
    """Into how many distinct parts its layout cuts a parameter; 1 for a plain tensor."""
    if not is_sharded(parameter):
        return 1
    laid = cast(Any, parameter)
    return math.prod(
        laid.device_mesh.size(i)
        for i, placement in enumerate(laid.placements)
        if not placement.is_replicate() and not placement.is_partial()
    )


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _device(parameters: Sequence[Tensor], sums: Sequence[Tensor]) -> torch.device:
    """Where the sums live, else the gradients; a rank that has neither takes the current accelerator."""
    for tensor in (*sums, *parameters):
        return tensor.device
    return torch.accelerator.current_accelerator() or torch.device("cpu")


def _exact(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
