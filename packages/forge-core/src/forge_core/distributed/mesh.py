"""The device mesh of a run: where this process stands along each axis, and the groups over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

from forge_core.contract.parts import MeshAxis
from forge_core.distributed.layout import carved, coordinates, flat_index, ordered, resolve_axes

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
REPLICATE, SHARD, CONTEXT, FSDP = "dp_replicate", "dp_shard", "cp", "fsdp"


class Mesh:
    """Axes, sizes and coordinates; the process groups over them where there are several processes.

    Sizes and coordinates are arithmetic: they are there for one process, and for a run that is only
    explained. A `DeviceMesh` exists only where a process group does. All ranks must ask for meshes and groups
    in the same order, for making one is collective.

    An axis that is carved from another regroups its ranks: "ep" of 2 carved from "dp_shard" of 4 gives the
    axes "dp_shard_rest" of 2 (outer) and "ep" of 2 (inner), which are used like any other. A mesh made of
    them holds the same ranks as one with "dp_shard".

    Args:
        axes: as `forge_mesh_axes` gives them.
        rank, world_size: of this process.
        device_type: "cpu", "cuda", ...
        connected: whether process groups can be made.

    Raises:
        ConfigError: the axes do not multiply to the number of processes.
    """

    def __init__(
        self,
        axes: Sequence[MeshAxis] = (),
        *,
        rank: int = 0,
        world_size: int = 1,
        device_type: str = "cpu",
        connected: bool = False,
    ) -> None:
        self.axes = resolve_axes(axes, world_size)
        self.world_rank, self.world_size = rank, world_size
        self.device_type, self.connected = device_type, connected and world_size > 1
        plain = ordered(self.axes)
        place = coordinates([axis.size for axis in plain], rank)
        self._sizes = {axis.name: axis.size for axis in plain}
        self._ranks = {axis.name: number for axis, number in zip(plain, place, strict=True)}
        self._sizes[FSDP] = self.size(SHARD) * self.size(CONTEXT)
        self._ranks[FSDP] = self.rank(SHARD) * self.size(CONTEXT) + self.rank(CONTEXT)
        for parent in dict.fromkeys(a.carved_from for a in self.axes if a.carved_from is not None):
            self._carve(parent)

    def _carve(self, parent: str) -> None:
        parts = carved(self.axes, parent)
        sizes = [self.size(parent) // math.prod(a.size for a in parts), *(a.size for a in parts)]
        place = coordinates(sizes, self.rank(parent))
        for name, size, number in zip(
            [f"{parent}_rest", *(a.name for a in parts)], sizes, place, strict=True
        ):
            self._sizes[name], self._ranks[name] = size, number

    def size(self, name: str) -> int:
        """Ranks along an axis; 1 for one that is not there."""
        return self._sizes.get(name, 1)

    def rank(self, name: str) -> int:
        """Coordinate of this process along an axis; 0 for one that is not there."""
        return self._ranks.get(name, 0)

    @property
    def data_size(self) -> int:
        """How many ranks read different samples."""
        return math.prod(axis.size for axis in self._data_axes)

    @property
    def data_rank(self) -> int:
        """Which of the ranks that read different samples this one belongs to."""
        axes = self._data_axes
        return flat_index([a.size for a in axes], [self.rank(a.name) for a in axes])

    @property
    def params_differ_size(self) -> int:
        """How many ranks hold different parameters throughout; axes carved from others do not count."""
        return math.prod(axis.size for axis in ordered(self.axes) if axis.params_differ)

    @cached_property
    def counts_data(self) -> bool:
        """Whether this rank is the one of those reading the same samples that counts them."""
        return all(self.rank(a.name) == 0 for a in ordered(self.axes) if not a.data_differs)

    @cached_property
    def counts_loss(self) -> bool:
        """Whether the loss of this rank is a part of the sum, not a copy of a peer's."""
        axes = ordered(self.axes)
        return all(self.rank(a.name) == 0 for a in axes if not (a.data_differs or a.loss_differs))

    @cached_property
    def loss_copies(self) -> int:
        """How many ranks have the same loss; the losses of all ranks, divided by it, add up."""
        axes = ordered(self.axes)
        return math.prod(a.size for a in axes if not (a.data_differs or a.loss_differs))

    @cached_property
    def device_mesh(self) -> DeviceMesh | None:
        """All axes of more than one rank as a DeviceMesh; None for one process."""
        if not self.connected:
            return None
        from torch.distributed.device_mesh import init_device_mesh

        # FSDP2 takes a mesh of two dimensions for replicas, also where each has all weights
        keep = [a for a in ordered(self.axes) if a.size > 1 or (a.name == SHARD and self.size(REPLICATE) > 1)]
        names = tuple(axis.name for axis in keep)
        sizes = tuple(axis.size for axis in keep)
        return remembered(
            (self.device_type, names, sizes),
            lambda: init_device_mesh(self.device_type, sizes, mesh_dim_names=names),
        )

    def sub(self, *names: str) -> DeviceMesh:
        """The mesh over the given axes, outermost first; each must be there.

        Raises:
            KeyError: an axis has one rank, or there is no process group.
        """
        root = self.device_mesh
        if root is None:
            raise KeyError(f"no mesh over {', '.join(names)}: {self.describe()}")
        if names == (FSDP,):
            return self._flat_fsdp(root)
        if FSDP in names:
            return _joined([self.sub(name) for name in names])
        known = root.mesh_dim_names or ()
        if all(name in known for name in names):
            return root[names if len(names) > 1 else names[0]]
        for view in self._views.values():
            if all(name in (view.mesh_dim_names or ()) for name in names):
                return view[names if len(names) > 1 else names[0]]
        return _joined([self.sub(name) for name in names]) if len(names) > 1 else self._missing(names[0])

    def _missing(self, name: str) -> DeviceMesh:
        raise KeyError(f"the mesh has no axis {name}: {self.describe()}")

    def _flat_fsdp(self, root: DeviceMesh) -> DeviceMesh:
        parts = [name for name in (SHARD, CONTEXT) if name in (root.mesh_dim_names or ())]
        if not parts:
            return self._missing(FSDP)
        return remembered(
            (self.device_type, FSDP, tuple(root.mesh_dim_names or ()), tuple(root.shape)),
            lambda: root[tuple(parts) if len(parts) > 1 else parts[0]]._flatten(FSDP),
        )

    @cached_property
    def _views(self) -> dict[str, DeviceMesh]:
        """By axis, the whole mesh with that axis split into what is carved from it."""
        root, views = self.device_mesh, {}
        assert root is not None
        for parent in dict.fromkeys(a.carved_from for a in self.axes if a.carved_from is not None):
            names = (f"{parent}_rest", *(a.name for a in carved(self.axes, parent)))
            sizes = tuple(self.size(name) for name in names)
            key = (self.device_type, tuple(root.mesh_dim_names or ()), tuple(root.shape), names, sizes)
            views[parent] = remembered(key, partial(root._unflatten, parent, sizes, names))
        return views

    def fsdp(self) -> DeviceMesh | None:
        """The ranks that share one replica's weights (dp_shard x cp) as one dimension "fsdp"; None for 1."""
        return self.sub(FSDP) if self.connected and self.size(FSDP) > 1 else None

    def replicate(self) -> DeviceMesh | None:
        """The replicas, one dimension "dp_replicate"; None for one."""
        return self.sub(REPLICATE) if self.connected and self.size(REPLICATE) > 1 else None

    def data_parallel(self) -> DeviceMesh | None:
        """What `fully_shard` takes: ("fsdp") or ("dp_replicate", "fsdp"), where "fsdp" may have size 1.

        None where every rank of this group is alone.
        """
        if self.replicate() is None:
            return self.fsdp()
        return self.sub(REPLICATE, FSDP)

    def group(self, name: str) -> dist.ProcessGroup | None:
        """The process group along an axis; None for one rank."""
        if not self.connected or self.size(name) == 1:
            return None
        return self.sub(name).get_group()

    @property
    def _data_axes(self) -> list[MeshAxis]:
        return [axis for axis in ordered(self.axes) if axis.data_differs]

    def describe(self) -> str:
        """`dp_shard 2 x tp 2, ep 2 of dp_shard`; "1 process"."""
        sizes = [f"{axis.name} {axis.size}" for axis in ordered(self.axes) if axis.size > 1]
        parts = [f"{axis.name} {axis.size} of {axis.carved_from}" for axis in carved(self.axes)]
        return ", ".join([" x ".join(sizes) or "1 process", *parts])


def _joined(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh._concatenate(list(meshes))


_made: tuple[Any, dict[Any, Any]] = (None, {})


def remembered(key: Any, make: Callable[[], T]) -> T:
    """What `make` gives, made once for the process group that is there: groups cost files and threads.

    Every rank must ask for the same keys in the same order.
    """
    global _made
    import torch.distributed as dist

    if _made[0] is not dist.group.WORLD:
        _made = (dist.group.WORLD, {})
    if key not in _made[1]:
        _made[1][key] = make()
    found: T = _made[1][key]
    return found
