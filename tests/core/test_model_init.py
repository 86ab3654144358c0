"""Roles and initial values: by module, by name and seed, complete, and the same on any layout."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from modelkit import config, tokens
from torch import Tensor, nn

from forge_core.config.tables import ModelConfig
from forge_core.errors import ForgeError
from forge_core.model import (
    Decoder,
    build_decoder,
    copy_full_into,
    default_parts,
    initialise,
    mark,
    materialise,
    parameter_roles,
)
from forge_core.model.init import generator_for
from forge_core.model.memory import check_filled, poison


def on_meta(model: ModelConfig) -> Decoder:
    with torch.device("meta"):
        return build_decoder(model, default_parts(model))


def ready(model: ModelConfig, seed: int = 7) -> Decoder:
    built = on_meta(model)
    materialise(built, "cpu", seed=seed, std=model.init_std, n_layers=model.n_layers)
    return built


def test_every_parameter_has_a_role() -> None:
    roles = parameter_roles(
        on_meta(config(n_layers=1, qk_norm=True, attention_bias=True, norm_type="layernorm"))
    )
    assert roles == {
        "embed.weight": "embedding",
        "layers.0.attn_norm.weight": "norm",
        "layers.0.attn_norm.bias": "bias",
        "layers.0.attn.q_proj.weight": "matrix",
        "layers.0.attn.q_proj.bias": "bias",
        "layers.0.attn.k_proj.weight": "matrix",
        "layers.0.attn.k_proj.bias": "bias",
        "layers.0.attn.v_proj.weight": "matrix",
        "layers.0.attn.v_proj.bias": "bias",
        "layers.0.attn.o_proj.weight": "matrix",
        "layers.0.attn.q_norm.weight": "norm",
        "layers.0.attn.k_norm.weight": "norm",
        "layers.0.mlp_norm.weight": "norm",
        "layers.0.mlp_norm.bias": "bias",
        "layers.0.mlp.gate_proj.weight": "matrix",
        "layers.0.mlp.up_proj.weight": "matrix",
        "layers.0.mlp.down_proj.weight": "matrix",
        "norm.weight": "norm",
        "norm.bias": "bias",
        "head.weight": "head",
    }


def test_a_tied_parameter_has_one_role_also_in_a_part_without_the_embedding() -> None:
    built = on_meta(config(tie_embeddings=True))
    roles = parameter_roles(built)
    assert roles["embed.weight"] == "embedding"
    assert "head.weight" not in roles
    built.embed = None
    assert parameter_roles(built)["head.weight"] == "embedding"


class Stack(nn.Module):
    """What a plugin may own: a stack of matrices, a gain, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.w_down = nn.Parameter(torch.empty(3, 64, 64))
        self.gain = nn.Parameter(torch.empty(5))
        self.register_buffer("load", torch.empty(3))
        mark(self, "w_down", role="matrices", init="residual")
        mark(self, "gain", init="ones")
        mark(self, "load", init="zeros")


def test_plugins_mark_what_they_register() -> None:
    stack = Stack()
    assert parameter_roles(stack) == {"w_down": "matrices", "gain": "other"}
    initialise(stack, 0, 0.02, 8)
    assert stack.w_down.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert stack.gain.tolist() == [1.0] * 5
    assert stack.get_buffer("load").tolist() == [0.0] * 3
    assert (
        mark(mark(nn.Linear(2, 2), role="head"), init="zeros").__dict__["forge_marks"]["weight"].role
        == "head"
    )
    with pytest.raises(ValueError, match="role 'wight' is not one of norm"):
        mark(stack, role="wight")
    with pytest.raises(ValueError, match="init 'normla' is not one of normal"):
        mark(stack, init="normla")


def test_matrices_have_the_std_of_their_role() -> None:
    model = config(
        dim=128,
        head_dim=32,
        ffn_hidden_dim=256,
        vocab_size=300,
        n_layers=8,
        attention_bias=True,
        init_std=0.02,
    )
    built = ready(model)
    residual = {f"layers.{i}.{name}.weight" for i in range(8) for name in ("attn.o_proj", "mlp.down_proj")}
    for name, role in parameter_roles(built).items():
        parameter = built.get_parameter(name)
        if role == "norm":
            assert (parameter == 1).all(), name
        elif role == "bias":
            assert (parameter == 0).all(), name
        else:
            want = 0.02 / math.sqrt(2 * 8) if name in residual else 0.02
            assert parameter.std().item() == pytest.approx(want, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.02 * 5 / math.sqrt(parameter.numel()), name
            residual.discard(name)
    assert not residual


@pytest.mark.parametrize("tied", [False, True])
def test_meta_build_equals_direct_build(tied: bool) -> None:
    model = config(tie_embeddings=tied, qk_norm=True, attention_bias=True, norm_type="layernorm")
    direct = build_decoder(model, default_parts(model))
    initialise(direct, 7, model.init_std, model.n_layers)
    built = ready(model)
    assert built.state_dict().keys() == direct.state_dict().keys()
    for name, tensor in built.state_dict().items():
        assert torch.equal(tensor, direct.state_dict()[name]), name
    assert built.embed is not None
    assert built.head is not None
    assert (built.head.weight is built.embed.weight) == tied
    assert torch.equal(built(tokens(1, 5)), direct(tokens(1, 5)))
    assert not torch.equal(ready(model, seed=8).embed.weight, built.embed.weight)  # type: ignore[union-attr]


def test_parameters_do_not_depend_on_each_other() -> None:
    """A stage of the model, and a model with one more layer, start with the same values by name."""
    whole, part = ready(config(n_layers=3)), on_meta(config(n_layers=3))
    part.embed = None
    del part.layers["0"], part.layers["1"]
    materialise(part, "cpu", seed=7, std=0.3, n_layers=3)
    assert set(dict(part.named_parameters())) == {
        name for name in dict(whole.named_parameters()) if not re.match(r"embed|layers\.[01]", name)
    }
    for name, parameter in part.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name)), name
    first, second = (whole.get_parameter(f"layers.{i}.attn.q_proj.weight") for i in (0, 1))
    assert not torch.equal(first, second)


def test_a_tied_head_without_its_embedding_starts_like_it() -> None:
    model = config(tie_embeddings=True)
    part = on_meta(model)
    part.embed = None
    materialise(part, "cpu", seed=7, std=0.3, n_layers=2)
    assert part.head is not None
    assert torch.equal(part.head.weight, ready(model).get_parameter("embed.weight"))


def test_wrappers_do_not_change_values() -> None:
    built = on_meta(config())
    built.layers["1"] = torch.compile(built.layers["1"], backend="eager")  # type: ignore[assignment]
    materialise(built, "cpu", seed=7, std=0.3, n_layers=2)
    assert "layers.1._orig_mod.attn.q_proj.weight" in dict(built.named_parameters())
    whole = ready(config())
    for name, parameter in built.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name.replace("_orig_mod.", ""))), name


def test_fp64_starts_with_the_fp32_values() -> None:
    model = config()
    built = on_meta(model)
    materialise(built, "cpu", torch.float64, seed=7, std=0.3, n_layers=2)
    for name, parameter in ready(model).named_parameters():
        assert built.get_parameter(name).dtype == torch.float64
        assert torch.equal(built.get_parameter(name), parameter.double()), name


def test_generators_are_pinned() -> None:
    """Values of one seed must not change from release to release."""
    drawn = torch.empty(2).normal_(generator=generator_for(42, "embed.weight"))
    again = torch.empty(2).normal_(generator=generator_for(42, "embed.weight"))
    assert torch.equal(drawn, again)
    assert generator_for(42, "embed.weight").initial_seed() == PINNED_SEED
    assert generator_for(43, "embed.weight").initial_seed() != PINNED_SEED


PINNED_SEED = 7848356735309078691


def test_what_nothing_initialises_is_named() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.empty(4))
            self.register_buffer("average", torch.empty(4))
            self.inner = nn.Linear(2, 2)

    model = nn.Sequential(nn.Linear(2, 2), Odd())
    with pytest.raises(ForgeError, match=r"nothing says how 1\.scale, 1\.average start"):
        materialise(model, "cpu", seed=0, std=0.02, n_layers=1)


class Resetting(nn.Module):
    """Fills itself; leaves out what it is told to."""

    def __init__(self, leave: str = "") -> None:
        super().__init__()
        self.leave = leave
        self.scale = nn.Parameter(torch.empty(4))
        self.register_buffer("average", torch.empty(4), persistent=False)
        self.register_buffer("count", torch.empty(1, dtype=torch.int64))

    def forge_reset(self, generator: Callable[[str], torch.Generator]) -> None:
        values = {
            "scale": torch.empty(4).uniform_(generator=generator("scale")),
            "average": torch.full((4,), 0.5),
            "count": torch.zeros(1),
        }
        for name, value in values.items():
            if name != self.leave:
                copy_full_into(getattr(self, name), value)


def test_modules_can_fill_themselves() -> None:
    model = nn.ModuleDict({"toy": Resetting()})
    materialise(model, "cpu", seed=3, std=0.02, n_layers=1)
    toy = model["toy"]
    assert torch.equal(toy.scale, torch.empty(4).uniform_(generator=generator_for(3, "toy.scale")))
    assert toy.average.tolist() == [0.5] * 4
    assert toy.count.tolist() == [0]


class Plainly(nn.Module):
    """Fills its parameter as one fills a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.empty(3))

    def forge_reset(self, generator: Callable[[str], torch.Generator]) -> None:
        self.rate.copy_(torch.tensor([1.0, 2.0, 3.0]))


def test_what_fills_a_module_needs_no_word_about_gradients() -> None:
    model = nn.ModuleDict({"toy": Plainly()})
    materialise(model, "cpu", seed=3, std=0.02, n_layers=1)
    assert model["toy"].rate.tolist() == [1.0, 2.0, 3.0]
    assert model["toy"].rate.requires_grad
    assert model["toy"].rate.grad_fn is None


@pytest.mark.parametrize("left", ["scale", "average", "count"])
def test_poison_finds_what_a_module_forgot(left: str) -> None:
    model = nn.ModuleDict({"toy": Resetting(leave=left)})
    with pytest.raises(ForgeError, match=rf"initialisation missed toy\.{left}$|missed toy\.{left}\n"):
        materialise(model, "cpu", seed=3, std=0.02, n_layers=1)


def test_poison_reaches_everything() -> None:
    built = ready(config(tie_embeddings=True))
    check_filled(built)
    poison(built)
    assert all(parameter.isnan().all() for parameter in built.parameters())
    with pytest.raises(ForgeError, match=r"embed\.weight.*norm\.weight"):
        check_filled(built)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A process group of four ranks of which only this one exists: sharding needs no communication."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
def test_a_shard_is_the_part_of_the_whole_value() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    full = torch.randn(6, 10)
    # rank 1 of a (2, 2) mesh has the coordinates (0, 1)
    for placements, part in (
        ((Shard(0), Replicate()), full[:3]),
        ((Replicate(), Shard(1)), full[:, 5:]),
        ((Shard(0), Shard(1)), full[:3, 5:]),
        ((Shard(0), Shard(0)), full[2:3]),
    ):
        target = distribute_tensor(torch.zeros(6, 10), mesh, placements, src_data_rank=None)
        copy_full_into(target, full.double())
        assert torch.equal(target.to_local(), part), placements


@pytest.mark.usefixtures("four_ranks")
def test_a_sharded_model_starts_with_its_part() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = config(tie_embeddings=True)
    built = on_meta(model)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    for block in built.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(built, mesh=mesh)
    materialise(built, "cpu", seed=7, std=0.3, n_layers=2)
    whole = ready(model)
    for name, parameter in built.named_parameters():
        assert isinstance(parameter, DTensor)
        full: Tensor = whole.get_parameter(name)
        rows = -(-full.shape[0] // 4)
        assert torch.equal(parameter.to_local(), full[rows : 2 * rows]), name
    assert built.head is not None
    assert built.embed is not None
    assert built.head.weight is built.embed.weight
