"""The mesh: sizes and coordinates worked out by hand, and the groups over them on four ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from forge_core.contract import MeshAxis
from forge_core.distributed.layout import needed_processes
from forge_core.distributed.mesh import Mesh
from forge_core.errors import ConfigError
from forge_core.testing import WorkerPool, tiny_config


def axes(replicate: int = 1, shard: int = -1, cp: int = 1, tp: int = 1, ep: int = 1) -> list[MeshAxis]:
    """Those of the core, in no particular order, and one that regroups the shards."""
    return [
        MeshAxis(name="tp", size=tp, place=50),
        MeshAxis(name="cp", size=cp, place=40, loss_differs=True),
        MeshAxis(name="dp_shard", size=shard, place=30, data_differs=True),
        MeshAxis(name="dp_replicate", size=replicate, place=20, data_differs=True),
        MeshAxis(name="ep", size=ep, place=35, carved_from="dp_shard", params_differ=True),
    ]


def test_one_process_has_a_mesh_without_groups() -> None:
    mesh = Mesh(axes())
    assert [mesh.size(name) for name in ("dp_shard", "tp", "fsdp", "unheard")] == [1, 1, 1, 1]
    assert mesh.rank("dp_shard") == mesh.rank("unheard") == 0
    assert mesh.device_mesh is mesh.fsdp() is mesh.replicate() is mesh.data_parallel() is None
    assert mesh.group("tp") is None
    assert (mesh.data_size, mesh.data_rank, mesh.counts_data, mesh.counts_loss) == (1, 0, True, True)
    assert mesh.describe() == "1 process"
    with pytest.raises(KeyError, match="no mesh over tp"):
        mesh.sub("tp")


def test_coordinates_of_every_rank() -> None:
    """16 ranks as replicate 2 x shard 2 x cp 2 x tp 2, the last varying fastest."""
    meshes = [Mesh(axes(2, -1, 2, 2), rank=rank, world_size=16) for rank in range(16)]
    for rank, mesh in enumerate(meshes):
        bits = [rank >> 3 & 1, rank >> 2 & 1, rank >> 1 & 1, rank & 1]
        assert [mesh.rank(n) for n in ("dp_replicate", "dp_shard", "cp", "tp")] == bits
        assert mesh.rank("fsdp") == bits[1] * 2 + bits[2]
        assert (mesh.data_size, mesh.data_rank) == (4, bits[0] * 2 + bits[1])
        assert (mesh.size("fsdp"), mesh.loss_copies) == (4, 2)
    # each sample is counted by one rank; the loss of a sequence lies on two, in copies on two more
    assert [r for r, mesh in enumerate(meshes) if mesh.counts_data] == [0, 4, 8, 12]
    assert [r for r, mesh in enumerate(meshes) if mesh.counts_loss] == [0, 2, 4, 6, 8, 10, 12, 14]


def test_an_axis_that_regroups_another() -> None:
    meshes = [Mesh(axes(ep=2), rank=rank, world_size=4) for rank in range(4)]
    assert [(m.rank("dp_shard_rest"), m.rank("ep")) for m in meshes] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [m.size(n) for m in meshes[:1] for n in ("dp_shard", "dp_shard_rest", "ep")] == [4, 2, 2]
    assert meshes[0].params_differ_size == 1  # of some parameters only
    assert meshes[0].describe() == "dp_shard 4, ep 2 of dp_shard"


@pytest.mark.parametrize(
    ("sizes", "world", "message"),
    [
        ({"tp": 2}, 3, "the mesh is tp 2, but there are 3 processes (start a multiple of 2"),
        (
            {"tp": 2},
            1,
            "the mesh is tp 2, but there is 1 process (start a multiple of 2, on one machine with --nproc 2",
        ),
        (
            {"shard": 2, "tp": 2},
            8,
            "the mesh is dp_shard 2 x tp 2, but there are 8 processes (start 4, on one machine with --nproc",
        ),
        ({"shard": 1}, 2, "the mesh is 1, but there are 2 processes (start 1"),
        ({"replicate": -1}, 4, "dp_replicate and dp_shard both take what is left"),
        (
            {"ep": 3, "tp": 2},
            4,
            "ep 3 regroups the 2 ranks of dp_shard, which it does not divide (start a multiple of 6, on one "
            "machine with --nproc 6, or change the sizes)",
        ),
        (
            {"ep": 3, "shard": 2},
            2,
            "ep 3 regroups the 2 ranks of dp_shard, which it does not divide (change the sizes)",
        ),
        ({"cp": 0}, 4, "axis cp has size 0"),
    ],
)
def test_what_does_not_fit_is_refused(sizes: dict[str, int], world: int, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Mesh(axes(**sizes), world_size=world)
    assert message in str(caught.value)


def test_the_fewest_processes_are_enough() -> None:
    """Those that are given, times the ranks that others regroup of the axis that takes what is left."""
    for sizes, fewest in (({}, 1), ({"tp": 2}, 2), ({"tp": 2, "ep": 3}, 6), ({"shard": 4, "ep": 2}, 4)):
        assert needed_processes(axes(**sizes)) == fewest
        Mesh(axes(**sizes), world_size=fewest)


def test_an_axis_carved_from_one_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="regroups the axis experts, which does not exist"):
        Mesh([MeshAxis(name="ep", size=2, place=1, carved_from="experts")], world_size=1)


def test_the_configuration_is_checked_against_the_number_of_processes() -> None:
    assert tiny_config(world_size=4, distributed={"tp": 2}).get("distributed").tp == 2
    with pytest.raises(ConfigError, match="the mesh is tp 2, but there are 3 processes"):
        tiny_config(world_size=3, distributed={"tp": 2})
    batch = {"batch_size": 2, "global_batch_size": 12}
    tiny_config(world_size=3, train=batch)
    with pytest.raises(ConfigError, match="12 is not a multiple of batch_size 2 x data ranks 4 = 8"):
        tiny_config(world_size=4, train=batch)
    with pytest.raises(ConfigError, match="12 is not batch_size 2 x data ranks 3 x grad_accum_steps 3"):
        tiny_config(world_size=3, train={**batch, "grad_accum_steps": 3})


def described(sizes: dict[str, int]) -> dict[str, Any]:
    """Ranks of every mesh that this rank is in."""
    mesh = Mesh(axes(**sizes), rank=dist.get_rank(), world_size=4, connected=True)

    def ranks(found: Any) -> Any:
        return None if found is None else [list(found.mesh_dim_names), found.mesh.tolist()]

    result = {
        "root": ranks(mesh.device_mesh),
        "fsdp": ranks(mesh.fsdp()),
        "data": ranks(mesh.data_parallel()),
    }
    if sizes.get("ep"):
        result["parts"] = ranks(mesh.sub("dp_shard_rest", "ep"))
        result["ep"] = dist.get_process_group_ranks(mesh.group("ep"))
    if sizes.get("tp"):
        result["tp"] = dist.get_process_group_ranks(mesh.group("tp"))
    return result


def test_meshes_on_four_ranks(pool4: WorkerPool) -> None:
    found = pool4.run(described, {"replicate": 2, "cp": 2})
    assert found[3]["fsdp"] == [["fsdp"], [2, 3]]
    assert found[3]["data"] == [["dp_replicate", "fsdp"], [[0, 1], [2, 3]]]
    found = pool4.run(described, {"replicate": 4})
    assert found[0]["fsdp"] is None
    assert found[0]["data"] == [["dp_replicate", "fsdp"], [[0], [1], [2], [3]]]
    found = pool4.run(described, {"tp": 2})
    assert found[2]["data"] == [["fsdp"], [0, 2]]
    assert found[3]["data"] == [["fsdp"], [1, 3]]
    assert [f["tp"] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    found = pool4.run(described, {"ep": 2})
    assert found[0]["data"] == [["fsdp"], [0, 1, 2, 3]]
    assert found[0]["parts"] == [["dp_shard_rest", "ep"], [[0, 1], [2, 3]]]
    assert [f["ep"] for f in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
