"""One decoder on several layouts, beside the same decoder in one process. Runs in the workers of a pool."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from modelkit import config as model_config
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from forge_core.config.tables import LossConfig, ModelConfig
from forge_core.contract import TensorPlan
from forge_core.loop.clip import GlobalNorm, settle_gradients
from forge_core.loop.naming import global_name
from forge_core.loop.transforms import compile_forward
from forge_core.loss import IGNORE, build_cross_entropy
from forge_core.model import Decoder, LayerParts, build_decoder, default_parts, materialise
from forge_core.model.parts import DefaultParts
from forge_core.parallel.context import divide_sequence
from forge_core.parallel.data import ShardPolicy, shard
from forge_core.parallel.recompute import Recompute, recompute_blocks
from forge_core.parallel.sequence import SequencePart
from forge_core.parallel.sync import reshard, set_gradient_sync
from forge_core.parallel.tensor import tensor_parallel

SEED = 3


@attrs.frozen(kw_only=True)
class Layout:
    """Sizes of a mesh and what else is on."""

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    cp_attention: str = "gather"
    tp: int = 1
    sequence_parallel: bool = True
    reshard: bool = True
    offload: bool = False
    recompute: str = "none"
    compile: bool = False

    def meshes(self) -> tuple[DeviceMesh | None, DeviceMesh | None, DeviceMesh | None]:
        """Of data ranks, context ranks and tensor ranks; None where there is one."""
        sizes = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "cp": self.cp, "tp": self.tp}
        kept = {n: s for n, s in sizes.items() if s > 1 or (n == "dp_shard" and self.dp_replicate > 1)}
        root = init_device_mesh("cpu", tuple(kept.values()), mesh_dim_names=tuple(kept))
        inner = tuple(n for n in ("dp_shard", "cp") if n in kept)
        data = root[inner]._flatten("fsdp") if inner else None
        if data is not None and self.dp_replicate > 1:
            data = DeviceMesh._concatenate([root["dp_replicate"], data])
        return data, root["cp"] if self.cp > 1 else None, root["tp"] if self.tp > 1 else None


class RunningMean(nn.Module):
    """A mixer that says nothing of how ranks divide it: the mean of what came before, projected."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor, context: Any) -> Tensor:
        counts = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]
        projected: Tensor = self.proj(x.cumsum(1) / counts)
        return projected


class Gated(nn.Module):
    """An FFN of another family, with a plan of its own and a name that nothing knows."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.into = nn.Linear(dim, 4 * dim)
        self.back = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor, context: Any) -> Tensor:
        result: Tensor = self.back(self.into(x).relu())
        return result

    def parallel_plan(self) -> TensorPlan:
        return TensorPlan(column=("into",), row=("back",), sequence="tokens")


class Predicated(DefaultParts):
    """The core's parts with a mask: the first tokens see each other, every fifth key nobody sees."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(None, None)

    def masks(self) -> list[tuple[str, Any]]:
        return [
            ("or", lambda context, q, k: (q < 6) & (k < 6)),
            ("and", lambda context, q, k: k % 5 != 0),
        ]


def family(model: ModelConfig, name: str) -> LayerParts:
    """The core's parts, with a mixer or an FFN of somebody else's."""
    if name == "mixer":
        return default_parts(model, mixer=lambda layer: RunningMean(model.dim))
    if name == "ffn":
        return default_parts(model, ffn=lambda layer: Gated(model.dim))
    return Predicated(model) if name == "predicates" else default_parts(model)


def embeds_given(decoder: Decoder) -> None:
    """Let it look tokens up itself, as a model around it would, and go on from embeddings."""

    def forward(tokens: Tensor, **rest: Any) -> Tensor:
        assert decoder.embed is not None
        return Decoder.forward(decoder, embeds=decoder.embed(tokens) * 2.0, **rest)

    decoder.forward = forward


def built(model: ModelConfig, dtype: torch.dtype = torch.float64, parts: str = "") -> Decoder:
    """The one-process decoder, built on the meta device."""
    with torch.device("meta"):
        decoder = build_decoder(model, family(model, parts))
    if parts == "embeds":
        embeds_given(decoder)
    fill(decoder, model, dtype)
    return decoder


def fill(decoder: nn.Module, model: ModelConfig, dtype: torch.dtype) -> None:
    materialise(decoder, "cpu", dtype, seed=SEED, std=model.init_std, n_layers=model.n_layers)


def laid_out(
    model: ModelConfig, layout: Layout, dtype: torch.dtype = torch.float64, parts: str = ""
) -> Decoder:
    """The same decoder on many ranks: sharded on the meta device, then filled."""
    data, context, tensor = layout.meshes()
    with torch.device("meta"):
        decoder = build_decoder(model, family(model, parts))
    if parts == "embeds":
        embeds_given(decoder)
    part = SequencePart(context, tensor if layout.sequence_parallel else None, layout.cp_attention)
    if tensor is not None:
        tensor_parallel(decoder, tensor, part)
    if context is not None or tensor is not None:
        divide_sequence(decoder, part)
    blocks = list(decoder.layers.values())
    for block in blocks if layout.compile else ():
        if layout.recompute == "full":
            compile_forward(block, "aot_eager")
        else:
            block.compile(backend="aot_eager")
    if layout.recompute != "none":
        recompute_blocks(blocks, Recompute(mode=layout.recompute))
    if data is not None:
        policy = ShardPolicy(reshard_after_forward=layout.reshard, cpu_offload=layout.offload)
        shard(decoder, decoder.layers.values(), data, policy)
    fill(decoder, model, dtype)
    return decoder


def batch(rows: int, length: int, vocabulary: int, seed: int, packed: bool = True) -> dict[str, Tensor]:
    """Packed rows with uneven masks."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (rows, length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    chances = torch.linspace(0.2, 1.0, rows)[:, None].expand(rows, length)
    targets[torch.bernoulli(chances, generator=generator) == 0] = IGNORE
    result = {"tokens": tokens[:, :-1], "targets": targets}
    if packed:
        starts = torch.bernoulli(torch.full((rows, length), 0.15), generator=generator)
        result["documents"] = starts.cumsum(1).to(torch.int32)
    return result


def loss_of(
    decoder: Decoder,
    data: dict[str, Tensor],
    count: int,
    z: float = 0.0,
    logits: bool = False,
) -> Tensor:
    loss = build_cross_entropy(LossConfig(z_loss_weight=z))
    rest = {name: data[name] for name in ("documents", "valid") if name in data}
    hidden = decoder(data["tokens"], **rest)
    targets = data["targets"] if decoder.part is None else decoder.part.own(data["targets"])
    if logits:
        total, _ = loss.from_logits(decoder.logits(hidden), targets)
    else:
        total, _ = loss(hidden, decoder.head.weight, targets)
    return total / count


def full(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def differences(
    layout: Layout,
    changes: dict[str, Any],
    *,
    accumulate: int = 1,
    packed: bool = True,
    z: float = 0.0,
    logits: bool = False,
    evaluate: bool = False,
    parts: str = "",
    length: int = 16,
    padded: bool = False,
) -> dict[str, float]:
    """Largest relative differences from one process: initial weights, loss, gradients, their norm."""
    model = model_config(**changes)
    plain, laid = built(model, parts=parts), laid_out(model, layout, parts=parts)
    ranks = layout.dp_replicate * layout.dp_shard
    # data ranks are outermost, so that this is the coordinate among them
    place = torch.distributed.get_rank() // (layout.cp * layout.tp)
    batches = [batch(2 * ranks, length, model.vocab_size or 0, seed, packed) for seed in range(accumulate)]
    for data in batches if padded else ():
        data["valid"] = torch.arange(length).expand(2 * ranks, length) < length - 3
    count = sum(int((b["targets"] != IGNORE).sum()) for b in batches)
    found = {"weights": _largest(dict(plain.named_parameters()), dict(laid.named_parameters()))}
    if evaluate:
        with torch.no_grad():
            loss_of(laid, batches[0], 1)
        reshard(laid)
    losses = torch.zeros((), dtype=torch.float64)
    for number, data in enumerate(batches):
        torch.manual_seed(number)
        whole = loss_of(plain, data, count, z)
        whole.backward()
        losses += whole.detach()
        set_gradient_sync(laid, number + 1 == accumulate)
        mine = {name: t[2 * place : 2 * place + 2] for name, t in data.items()}
        torch.manual_seed(number)
        part = loss_of(laid, mine, count, z, logits)
        part.backward()
        losses -= _summed(part.detach(), layout)
    found["loss"] = abs(float(losses))
    world = torch.distributed.get_world_size()
    norm, _ = GlobalNorm(laid, world_size=world)([p for p in laid.parameters() if p.grad is not None])
    expected, _ = GlobalNorm()(list(plain.parameters()))
    found["norm"] = abs(float(norm / expected) - 1)
    settle_gradients(laid.parameters())
    found["gradients"] = _largest(
        {n: p.grad for n, p in plain.named_parameters()}, {n: p.grad for n, p in laid.named_parameters()}
    )
    return found


def _summed(loss: Tensor, layout: Layout) -> Tensor:
    """Over data and context ranks; tensor ranks have the same."""
    total = loss / layout.tp
    torch.distributed.all_reduce(total)
    return total


def _largest(plain: dict[str, Any], laid: dict[str, Any]) -> float:
    names = {global_name(name): name for name in laid}
    assert names.keys() == plain.keys(), (list(names), list(plain))
    worst = 0.0
    for name, value in plain.items():
        other = full(laid[names[name]])
        assert other.shape == value.shape, name
        scale = value.abs().max().clamp(min=1e-12)
        difference = float(((other - value).abs().max() / scale).detach())
        if difference > worst or difference != difference:
            worst = difference
        if difference > 1e-8:
            print("differs:", name, difference, flush=True)
    return worst
