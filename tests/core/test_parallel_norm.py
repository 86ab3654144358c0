"""The global norm over ranks, and clipping, on plain tensors and DTensors of any mesh."""

from __future__ import annotations

import math
from typing import Any

import attrs
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from forge_core.contract import MeshAxis
from forge_core.loop.clip import GlobalNorm, clip_, settle_gradients
from forge_core.model import mark
from forge_core.testing.pool import WorkerPool


@attrs.frozen
class Sizes:
    """A mesh as the norm sees it."""

    axes: tuple[MeshAxis, ...] = ()

    def size(self, name: str) -> int:
        return next((axis.size for axis in self.axes if axis.name == name), 1)


def plain(value: float, count: int = 1) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(count))
    parameter.grad = torch.full((count,), value)
    return parameter


def laid(mesh: Any, gradient: torch.Tensor, placements: list[Any], given: list[Any] | None = None) -> Any:
    """A DTensor parameter with this local gradient."""
    parameter = nn.Parameter(DTensor.from_local(torch.zeros_like(gradient), mesh, placements))
    parameter.grad = DTensor.from_local(gradient, mesh, given or placements)
    return parameter


def mixed_layouts(rank: int) -> tuple[float, float, float]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    parameters = [
        plain(3.0),  # the same on all four ranks: 9
        laid(mesh["fsdp"], torch.full((2,), 1.0 + rank // 2), [Shard(0)]),  # 1 1 | 2 2: 10
        laid(mesh["tp"], torch.full((1,), 1.0 + rank % 2), [Shard(0)]),  # 1 | 2: 5
        laid(mesh, torch.full((1, 1), 1.0 + rank), [Shard(0), Shard(1)]),  # 1 2 3 4: 30
        laid(mesh["tp"], torch.full((2,), 1.0), [Replicate()], [Partial()]),  # 1 + 1 twice: 8
    ]
    norm, [loss, count] = GlobalNorm(world_size=4)(
        parameters, [torch.tensor(1.0 + rank // 2), torch.tensor(1, dtype=torch.int64)], holders=(2, 1)
    )
    clip_([p.grad for p in parameters], norm, float(norm) / 2)
    assert parameters[4].grad.placements == (Replicate(),)
    return float(norm), float(loss), float(count) + float(parameters[0].grad)


def test_every_layout_counts_once(pool4: WorkerPool) -> None:
    for norm, loss, rest in pool4.run(mixed_with_rank):
        assert math.isclose(norm, math.sqrt(9 + 10 + 5 + 30 + 8), rel_tol=1e-6)
        assert loss == 3.0  # 1 on one data rank and 2 on the other, each on two tensor ranks
        assert math.isclose(rest, 4 + 1.5, rel_tol=1e-5)  # four ranks, and half of the gradient 3


def mixed_with_rank() -> tuple[float, float, float]:
    return mixed_layouts(torch.distributed.get_rank())


def differing_parameters() -> tuple[float, float]:
    rank = torch.distributed.get_rank()
    stages = MeshAxis(name="stage", size=2, place=10, params_differ=True)
    apart = Sizes((stages, MeshAxis(name="dp_shard", size=2, place=30, data_differs=True)))
    stage, inner = divmod(rank, 2)
    model = nn.ParameterDict({"own": plain(1.0 + stage), "both": plain(2.0)})
    mark(model, "both", copies=2)
    first, _ = GlobalNorm(model, apart, world_size=4)(list(model.values()))
    carved = MeshAxis(name="groups", size=2, place=35, carved_from="dp_shard", params_differ=True)
    model = nn.ParameterDict({"shared": plain(3.0), "apart": plain(1.0 + inner)})
    mark(model, "apart", axes=("groups",))
    second, _ = GlobalNorm(model, Sizes((*apart.axes[1:], carved)), world_size=4)(list(model.values()))
    return float(first), float(second)


def test_parameters_that_differ_along_axes(pool4: WorkerPool) -> None:
    for first, second in pool4.run(differing_parameters):
        # stages hold 1 and 2; what both hold, 2, counts once
        assert math.isclose(first, math.sqrt(1 + 4 + 4), rel_tol=1e-6)
        # all hold 3; the two ranks of a group hold 1 and 2
        assert math.isclose(second, math.sqrt(9 + 1 + 4), rel_tol=1e-6)


def broken() -> list[float]:
    rank = torch.distributed.get_rank()
    norm = GlobalNorm(world_size=2)
    bad, _ = norm([plain(math.inf if rank else 1.0)])
    worse, [loss] = norm([plain(1.0)], [torch.tensor(math.nan if rank else 1.0)])
    large, _ = norm([plain(1e15, 10)])
    unequal, _ = norm([plain(1.0)] if rank else [])
    return [float(bad), float(worse), float(loss), float(large), float(unequal)]


def test_broken_and_missing_gradients(pool2: WorkerPool) -> None:
    for bad, worse, loss, large, unequal in pool2.run(broken):
        assert bad == math.inf
        assert worse == 1.0
        assert math.isnan(loss)
        assert math.isclose(large, 1e15 * math.sqrt(10), rel_tol=1e-6)
        assert math.isclose(unequal, math.sqrt(0.5), rel_tol=1e-6)  # one of two holders has it


def reduced_calls() -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    several = [laid(mesh, torch.ones(3), [Replicate()], [Partial()]) for _ in range(5)]
    calls: list[int] = []
    original = torch.distributed.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(tensor.numel())
        return original(tensor, *args, **kwargs)

    torch.distributed.all_reduce = counted
    try:
        settle_gradients(several)
        GlobalNorm(world_size=2)(several, [torch.tensor(1.0)])
    finally:
        torch.distributed.all_reduce = original
    assert all(float(p.grad.to_local().sum()) == 6.0 for p in several)
    return len(calls), calls[-1]


def test_one_reduction_for_the_norm_and_one_for_all_partial_sums(pool2: WorkerPool) -> None:
    assert pool2.run(reduced_calls) == [(2, 2), (2, 2)]


def test_one_process_makes_no_group() -> None:
    norm, [loss] = GlobalNorm()([plain(3.0), plain(4.0)], [torch.tensor(2.0)])
    assert (float(norm), float(loss)) == (5.0, 2.0)
