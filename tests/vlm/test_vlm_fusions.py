"""Each fusion against a plain reference, and as the text model that it is without images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_vlm_model import CLOSE, batch_of, hidden_of, session_of
from torch import Tensor
from vlmkit import TOKENS, config_of, images_of, mixed_records, write_samples

from forge_core.errors import ConfigError
from forge_core.loop.session import TrainingSession
from forge_core.model import mark
from forge_core.plugins import Plugins
from forge_core.testing import isolated_plugins, plugin_object, tiny_session
from forge_vlm.axes import of_modality
from forge_vlm.fusions.gated_cross import _beside
from forge_vlm.fusions.mot import NORMS
from forge_vlm.generate import generate, questions_of

CROSS: dict[str, Any] = {"fusion": "cross_attention", "cross_attention": {"every": 2}}
GATED: dict[str, Any] = {
    "fusion": "gated_cross_attention",
    "gated_cross_attention": {"layers": [1], "marked": False},
}
MOT: dict[str, Any] = {"fusion": "mot"}
APART: dict[str, Any] = {"fusion": "mot", "mot": {"positions": "modality"}}
MOMA: dict[str, Any] = {"fusion": "moma"}
MOE: dict[str, Any] = {"num_experts": 4, "top_k": 2, "expert_hidden_dim": 24}
EVERY: list[dict[str, dict[str, Any]]] = [
    {"vlm": {}},
    {"vlm": CROSS},
    {"vlm": MOT},
    {"vlm": MOMA, "moe": MOE},
    {"vlm": GATED},
]
NAMES = ["joint", "cross_attention", "mot", "moma", "gated_cross_attention"]
BIASED: dict[str, Any] = {"attention_bias": True, "output_bias": True, "mlp_bias": True}
SLIDING: dict[str, Any] = {"n_layers": 2, "sliding_window": 5, "layer_types": ["sliding", "full"]}
LATENT: dict[str, Any] = {**MOE, "mla": {"kv_rank": 6, "q_rank": 5, "nope_dim": 4, "v_dim": 6}}
OF_BLOCKS: dict[str, dict[str, dict[str, Any]]] = {
    "norms": {"model": {"qk_norm": True}},
    "norms over all heads, after": {
        "model": {"qk_norm": True, "qk_norm_over": "all_heads", "block_norm": "post"}
    },
    "dropout": {"model": {"block_norm": "sandwich", "dropout": 0.3}},
    "biases": {"model": BIASED},
    "biases, no gate": {"model": {**BIASED, "gated_mlp": False}},
    "windows": {"model": SLIDING},
    "latent": {"moe": LATENT, "model": {**BIASED, "attention_softcap": 0.5}},
    "latent, experts in one layer": {"moe": {**LATENT, "layers": [1]}},
}
"""What blocks may have, of which mot has everything for each modality."""
CHOICE: dict[str, Any] = {**MOE, "router": "expert_choice", "expert_choice": {"auxiliary": True}}
FURTHER: list[dict[str, dict[str, Any]]] = [
    {"vlm": CROSS, "moe": MOE},
    {"vlm": MOT, "moe": {**MOE, "shared_experts": 1}},
    {"vlm": MOT, "moe": LATENT, "model": SLIDING},
    {"vlm": MOT, "model": BIASED},
    {"vlm": MOMA, "moe": LATENT},
    {"vlm": MOMA, "moe": CHOICE},
    {"vlm": {"joint": {"bidirectional": "image"}}},
    {"vlm": {**MOT, "mot": {"bidirectional": "prefix"}}},
    {"vlm": APART},
]
"""With experts of text alone, of each modality, and those that choose their tokens; who sees whom."""
each_fusion = pytest.mark.parametrize("more", EVERY, ids=NAMES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("samples"), mixed_records())


def drawn(session: TrainingSession) -> None:
    """Random values for everything, also for what starts at 0."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in session.model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.2)


def text_alone(session: TrainingSession, batch: dict[str, Tensor]) -> Tensor:
    """The decoder's own blocks one after another on the tokens, as the text model has them."""
    decoder: Any = session.model.decoder
    inputs = {name: batch[name] for name in ("positions", "documents", "valid")}
    with torch.no_grad():
        x = decoder.look_up(batch["tokens"])
        context = decoder.context(x, **inputs, apart=True)
        for name, block in decoder.layers.items():
            if name.isdecimal():
                x = block(x, context)
        found: Tensor = decoder.norm(x)
        return found


def test_cross_attention_is_the_text_model_at_the_start(folder: Path) -> None:
    with session_of(folder, vlm=CROSS) as session:
        batch = batch_of(session)
        assert bool(batch["present"].any())
        assert (batch["image_index"] == -1).all()
        torch.testing.assert_close(hidden_of(session, batch), text_alone(session, batch), rtol=0, atol=0)


def test_mot_is_the_text_model_without_images(folder: Path) -> None:
    with session_of(folder, vlm=MOT) as session:
        batch = batch_of(session)
        expected = text_alone(session, batch)
        found = hidden_of(session, batch)
        torch.testing.assert_close(found[[1, 3]], expected[[1, 3]], **CLOSE)
        names = set(dict(session.model.decoder.named_parameters()))  # type: ignore[operator]
    with session_of(folder) as text:
        assert set(dict(text.model.decoder.named_parameters())) < names  # type: ignore[operator]


@pytest.mark.packages("moe", "vlm")
@pytest.mark.parametrize("more", OF_BLOCKS.values(), ids=OF_BLOCKS)
def test_mot_with_equal_weights_is_the_joint_decoder(folder: Path, more: dict[str, Any]) -> None:
    with session_of(folder, vlm=MOT, **more) as mot:
        drawn(mot)
        batch = batch_of(mot)
        model: Any = mot.model
        with torch.no_grad():
            for block in model.decoder.layers.values():
                image = block.mlp.image if block.image_mlp is None else block.image_mlp
                pairs = [(image, block.mlp), (block.attn.image, block.attn)]
                pairs += [(getattr(block, f"image_{name}"), getattr(block, name)) for name in NORMS]
                for ours, theirs in pairs:
                    values = {} if theirs is None else theirs.state_dict()
                    if ours is not None:
                        ours.load_state_dict({name: values[name] for name in ours.state_dict()})
        found = hidden_of(mot, batch)
        torch.manual_seed(2)
        training = hidden_of_training(mot, batch)
        weights = {k: v for k, v in model.state_dict().items() if "image" not in k}
    with session_of(folder, **more) as joint:
        joint.model.load_state_dict(weights)
        torch.testing.assert_close(hidden_of(joint, batch), found, **CLOSE)
        torch.manual_seed(2)
        torch.testing.assert_close(hidden_of_training(joint, batch), training, **CLOSE)
    assert torch.equal(training, found) == ("dropout" not in more.get("model", {}))


@pytest.mark.packages("moe", "vlm")
@pytest.mark.parametrize("more", OF_BLOCKS.values(), ids=OF_BLOCKS)
def test_mot_of_any_blocks_starts_as_the_text_model(folder: Path, more: dict[str, Any]) -> None:
    """Text without images is as in the text model, visual tokens pass every block unchanged."""
    with session_of(folder, vlm=MOT, **more) as session:
        batch = batch_of(session)
        model: Any = session.model
        states: list[Tensor] = []
        handles = [
            block.register_forward_hook(lambda _, args, y: states.extend((args[0], y)))
            for block in model.decoder.layers.values()
        ]
        found = hidden_of(session, batch)
        for handle in handles:
            handle.remove()
        visual = batch["image_index"] >= 0
        torch.testing.assert_close(states[-1][visual], states[0][visual], **CLOSE)
        weights = {k: v for k, v in model.state_dict().items() if "image" not in k}
    with session_of(folder, **more) as joint:
        joint.model.load_state_dict(weights)
        torch.testing.assert_close(hidden_of(joint, batch)[[1, 3]], found[[1, 3]], **CLOSE)


@pytest.mark.packages("moe", "vlm")
@pytest.mark.parametrize("moe", [{}, {"moe": {**MOE, "shared_experts": 1}}], ids=["mlp", "experts"])
def test_mot_that_copies_starts_as_the_joint_decoder(folder: Path, moe: dict[str, Any]) -> None:
    vlm = {**MOT, "mot": {"copy_text": True}}
    with session_of(folder, vlm=vlm, model={"qk_norm": True}, **moe) as mot:
        batch = batch_of(mot)
        found = hidden_of(mot, batch)
        weights = {k: v for k, v in mot.model.state_dict().items() if "image" not in k}
    with session_of(folder, model={"qk_norm": True}, **moe) as joint:
        joint.model.load_state_dict(weights)
        torch.testing.assert_close(hidden_of(joint, batch), found, **CLOSE)


def hidden_of_training(session: TrainingSession, batch: dict[str, Tensor]) -> Tensor:
    """Hidden states in training mode, with the random numbers that come next."""
    session.model.train()
    return hidden_of(session, batch)


def plain_cross(block: Any, x: Tensor, features: Tensor, sees: list[list[int]]) -> Tensor:
    """One row x (S, D): each token asks the visual tokens (N, D) of the images that it sees, one by one."""
    a, out = block.attn, []
    h = block.attn_norm(x)
    for position, token in enumerate(h):
        slots = [slot * TOKENS + j for slot in sees[position] for j in range(TOKENS)]
        if not slots:
            out.append(torch.zeros_like(token))
            continue
        q = a.q_proj(token).view(a.n_heads, -1)
        k, v = (p(features[slots]).view(len(slots), a.n_heads, -1) for p in (a.k_proj, a.v_proj))
        weights = torch.einsum("hd,nhd->hn", q, k).div(q.shape[-1] ** 0.5).softmax(-1)
        out.append(a.o_proj(torch.einsum("hn,nhd->hd", weights, v).flatten()))
    x = x + torch.stack(out)
    h, m = block.mlp_norm(x), block.mlp
    return x + m.down_proj(F.silu(m.gate_proj(h)) * m.up_proj(h))


def test_cross_attention_equals_a_plain_loop(folder: Path) -> None:
    with session_of(folder, vlm=CROSS) as session:
        drawn(session)
        batch = batch_of(session)
        model: Any = session.model
        block = model.decoder.layers["1_after0"]
        caught: dict[str, Tensor] = {}
        handle = block.register_forward_hook(lambda _, args, y: caught.update(x=args[0], y=y))
        hidden_of(session, batch)
        handle.remove()
        with torch.no_grad():
            features = model.sight.features(model, images_of(batch))
            for row in range(4):
                length = int(batch["valid"][row].sum())
                places = batch["image_places"][row].tolist()
                slots = [slot for slot in range(2) if batch["present"][row, slot]]
                sees = [[slot for slot in slots if places[slot] <= at] for at in range(length)]
                expected = plain_cross(block, caught["x"][row, :length], features[row], sees)
                torch.testing.assert_close(caught["y"][row, :length], expected, **CLOSE)
        assert sees == [[]] * length  # the last row has no image; in the third the second comes later
        assert batch["image_places"][2].tolist() == [1, 4]


@pytest.mark.parametrize(("more", "name"), [(CROSS, "1_after0"), (GATED, "1")])
def test_blocks_that_ask_images_drop_what_they_add(folder: Path, more: dict[str, Any], name: str) -> None:
    """As every block of the decoder does."""
    with session_of(folder, vlm=more, model={"dropout": 0.3}) as session:
        drawn(session)
        model: Any = session.model
        block = model.decoder.layers[name]
        caught: list[Any] = []
        block.register_forward_pre_hook(lambda _, args: caught.extend(args))
        hidden_of(session, batch_of(session))
        x, context = caught[:2]
        block.train()
        with torch.no_grad():
            torch.manual_seed(1)
            found = block(x, context)
            torch.manual_seed(1)
            asks = block.attn if more is CROSS else block.cross
            gates = [1, 1] if more is CROSS else [block.attn_gate.tanh(), block.mlp_gate.tanh()]
            some = 1 if more is CROSS else _beside(x, context)
            x = x + gates[0] * F.dropout(asks(block.attn_norm(x), context), 0.3)
            x = x + gates[1] * F.dropout(block.mlp(block.mlp_norm(x), context) * some, 0.3)
        torch.testing.assert_close(found, x, **CLOSE)


def plain_mot(block: Any, x: Tensor, here: list[bool]) -> Tensor:
    """One row x (S, D), token by token with the weights of its modality; attention over all before it."""
    from forge_core.model import rotate

    a, length = block.attn, len(x)
    norms = [block.image_attn_norm if v else block.attn_norm for v in here]
    h = [norm(token) for norm, token in zip(norms, x, strict=True)]

    def heads(name: str) -> Tensor:
        rows = [getattr(a.image if v else a, name)(t) for v, t in zip(here, h, strict=True)]
        return torch.stack(rows).view(1, length, -1, a.head_dim)

    cos, sin = block.tables
    q, k = (
        rotate(heads("q_proj"), cos[:length], sin[:length]),
        rotate(heads("k_proj"), cos[:length], sin[:length]),
    )
    y = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), heads("v_proj").transpose(1, 2), is_causal=True
    )
    y = y.transpose(1, 2).reshape(length, -1)
    x = x + torch.stack([(a.image if v else a).o_proj(t) for v, t in zip(here, y, strict=True)])
    rows = []
    for v, token in zip(here, x, strict=True):
        m = block.mlp.image if v else block.mlp
        t = (block.image_mlp_norm if v else block.mlp_norm)(token)
        rows.append(token + m.down_proj(F.silu(m.gate_proj(t)) * m.up_proj(t)))
    return torch.stack(rows)


@pytest.mark.parametrize("model", [{}, BIASED], ids=["no biases", "biases"])
def test_mot_equals_a_plain_loop(folder: Path, model: dict[str, Any]) -> None:
    with session_of(folder, vlm=MOT, model=model) as session:
        drawn(session)
        batch = batch_of(session)
        decoder: Any = session.model.decoder
        block = decoder.layers["0"]
        caught: dict[str, Tensor] = {}
        handle = block.register_forward_hook(lambda _, args, y: caught.update(x=args[0], y=y))
        hidden_of(session, batch)
        handle.remove()
        context = decoder.context(caught["x"][:1])
        block.tables = (context.cos, context.sin)
        with torch.no_grad():
            for row in range(4):
                length = int(batch["valid"][row].sum())
                here = (batch["image_index"][row, :length] >= 0).tolist()
                expected = plain_mot(block, caught["x"][row, :length], here)
                torch.testing.assert_close(caught["y"][row, :length], expected, **CLOSE)


class Shifted(torch.nn.Module):
    """A mixer of somebody else: the token before. It says nothing of projections."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor, context: Any) -> Tensor:
        y: Tensor = self.proj(F.pad(x, (0, 0, 1, 0))[:, :-1])
        return y


class Squared(torch.nn.Module):
    """A feed-forward part of somebody else."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = (torch.nn.Linear(dim, dim, bias=False) for _ in range(2))
        mark(self.down, init="residual")

    def forward(self, x: Tensor, context: Any) -> Tensor:
        assert context.documents is not None  # all of a context is there
        y: Tensor = self.down(self.up(x).square())
        return y


def test_positions_of_each_modality_count_from_0_in_each_document() -> None:
    """Two documents and a row's padding, in a row that a generation moved right by one."""
    index = torch.tensor([[-1, -1, 0, 1, -1, 2, -1, 3, -1, -1]])
    positions = torch.tensor([[0, 0, 1, 2, 3, 4, 5, 0, 1, 2]])
    expected = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 0, 0, 1]])
    torch.testing.assert_close(of_modality(positions, index), expected)


@pytest.mark.parametrize("data", [{}, {"packing": "best_fit"}], ids=["a row each", "packed"])
def test_mot_that_counts_each_modality_is_mot_at_those_positions(folder: Path, data: dict[str, Any]) -> None:
    found = {}
    for name, vlm in (("apart", APART), ("together", MOT)):
        with session_of(folder, vlm=vlm, data=data) as session:
            drawn(session)
            batch = batch_of(session)
            if name == "together":
                assert (batch["image_index"] >= 0).any()
                batch["positions"] = torch.tensor(
                    [
                        counted_by_hand(documents, index)
                        for documents, index in zip(
                            batch["documents"].tolist(), batch["image_index"].tolist(), strict=True
                        )
                    ]
                )
            found[name] = hidden_of(session, batch)
            found[name, "as they stand"] = hidden_of(session, batch_of(session))
    torch.testing.assert_close(found["apart"], found["together"], **CLOSE)
    assert not torch.allclose(found["apart"], found["together", "as they stand"])


def counted_by_hand(documents: list[int], index: list[int]) -> list[int]:
    """Of one row, token by token."""
    counts: dict[tuple[int, bool], int] = {}
    found = []
    for document, visual in zip(documents, index, strict=True):
        kind = (document, visual >= 0)
        found.append(counts.get(kind, 0))
        counts[kind] = found[-1] + 1
    return found


def test_mot_takes_what_other_plugins_build(folder: Path) -> None:
    """A mixer that is no attention is shared; everything else is there for each modality."""
    import forge_vlm.plugin

    mine = plugin_object(
        forge_build_mixer=lambda layer: Shifted(layer.model.dim) if layer.index == 0 else None,
        forge_build_ffn=lambda layer: Squared(layer.model.dim) if layer.index == 1 else None,
    )
    plugins = isolated_plugins({"vlm": forge_vlm.plugin, "mine": mine})
    with tiny_session(config_of(folder, plugins, vlm=MOT, mine={}), plugins) as session:
        session.model.eval()
        model: Any = session.model
        first, second = model.decoder.layers.values()
        assert type(first.attn) is Shifted
        assert not second.image_mlp.down.weight.any()
        assert second.mlp.down.weight.any()
        assert second.attn.image.o_proj.weight.shape == second.attn.o_proj.weight.shape
        batch = batch_of(session)
        found = hidden_of(session, batch)
        weights = {k: v for k, v in model.state_dict().items() if "image" not in k}
    plugins = isolated_plugins({"vlm": forge_vlm.plugin, "mine": mine})
    with tiny_session(config_of(folder, plugins, mine={}), plugins) as joint:
        joint.model.eval()
        joint.model.load_state_dict(weights)
        torch.testing.assert_close(hidden_of(joint, batch)[[1, 3]], found[[1, 3]], **CLOSE)


def plain_latent(a: Any, token: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value, (heads, width) each, of one token with the weights of one modality."""

    def rotated(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        pairs = x.view(*x.shape[:-1], half, 2)
        one, other, c, s = pairs[..., 0], pairs[..., 1], cos[..., :half], sin[..., half:]
        return torch.cat((one * c - other * s, one * s + other * c), -1)

    heads, plain = a.heads, a.mla.nope_dim
    q = a.q_b_proj(a.q_a_norm(a.q_a_proj(token))).view(heads, -1)
    latent, key = a.kv_a_proj(token).split([a.mla.kv_rank, a.rope_dim])
    both = a.kv_b_proj(a.kv_a_norm(latent)).view(heads, -1)
    q = torch.cat((q[:, :plain], rotated(q[:, plain:])), -1)
    k = torch.cat((both[:, :plain], rotated(key).expand(heads, -1)), -1)
    return q, k, both[:, plain:]


@pytest.mark.packages("moe", "vlm")
@pytest.mark.parametrize("cap", [None, 0.5])
def test_latent_attention_of_mot_equals_a_plain_loop(folder: Path, cap: float | None) -> None:
    model = {} if cap is None else {**BIASED, "attention_softcap": cap}
    with session_of(folder, vlm=MOT, moe=LATENT, model=model) as session:
        drawn(session)
        batch = batch_of(session)
        decoder: Any = session.model.decoder
        mixer = decoder.layers["0"].attn
        caught: dict[str, Tensor] = {}
        handle = mixer.register_forward_hook(lambda _, args, y: caught.update(x=args[0], y=y))
        hidden_of(session, batch)
        handle.remove()
        context = decoder.context(caught["x"][:1])
        cos, sin = (table.view(-1, mixer.rope_dim) for table in (context.cos, context.sin))
        with torch.no_grad():
            for row in range(4):
                length = int(batch["valid"][row].sum())
                modes = [mixer.image if at >= 0 else mixer for at in batch["image_index"][row, :length]]
                tokens = zip(modes, caught["x"][row, :length], cos, sin, strict=False)
                q, k, v = (
                    torch.stack(parts) for parts in zip(*(plain_latent(*t) for t in tokens), strict=True)
                )
                scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
                scores = scores if cap is None else cap * torch.tanh(scores / cap)
                later = torch.ones(length, length, dtype=torch.bool).triu(1)
                weights = scores.masked_fill(later, -torch.inf).softmax(-1)
                y = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
                expected = torch.stack([mode.o_proj(t) for mode, t in zip(modes, y, strict=True)])
                torch.testing.assert_close(caught["y"][row, :length], expected, **CLOSE)


@pytest.mark.packages("moe", "vlm")
def test_mot_has_experts_for_each_modality(folder: Path) -> None:
    """At the start visual tokens pass unchanged, and text has the weights and names of a text model."""
    with session_of(folder, vlm=MOT, moe={**MOE, "shared_experts": 1}) as session:
        batch = batch_of(session)
        model: Any = session.model
        block = model.decoder.layers["0"]
        caught: dict[str, Tensor] = {}
        handles = [
            block.register_forward_hook(lambda _, args, y: caught.update(x=args[0], y=y)),
            block.mlp_norm.register_forward_hook(lambda _, args, y: caught.update(h=args[0])),
        ]
        hidden_of(session, batch)
        visual = batch["image_index"] >= 0
        torch.testing.assert_close(caught["y"][visual], caught["x"][visual], **CLOSE)
        drawn(session)
        hidden_of(session, batch)
        for handle in handles:
            handle.remove()
        with torch.no_grad():
            for row in range(4):
                for at in range(int(batch["valid"][row].sum())):
                    image = bool(visual[row, at])
                    layer = block.image_mlp if image else block.mlp
                    h = caught["h"][row, at]
                    token = (block.image_mlp_norm if image else block.mlp_norm)(h)
                    expected = h + plain_experts(layer, token) + layer.shared(token, None)
                    torch.testing.assert_close(caught["y"][row, at], expected, **CLOSE)
        names = set(dict(model.decoder.named_parameters()))
    with session_of(folder, moe={**MOE, "shared_experts": 1}) as text:
        assert set(dict(text.model.decoder.named_parameters())) < names  # type: ignore[operator]


def plain_experts(layer: Any, token: Tensor) -> Tensor:
    """A token through its two likeliest experts."""
    scores = (layer.router.weight @ token).softmax(-1)
    values, chosen = scores.topk(2)
    e, total = layer.experts, torch.zeros_like(token)
    for share, number in zip(values / values.sum(), chosen.tolist(), strict=True):
        hidden = F.silu(e.w_gate[number] @ token) * (e.w_up[number] @ token)
        total = total + share * (e.w_down[number] @ hidden)
    return total


@pytest.mark.packages("moe", "vlm")
def test_moma_routes_each_modality_among_its_own_experts(folder: Path) -> None:
    with session_of(folder, vlm=MOMA, moe=MOE) as session:
        drawn(session)
        batch = batch_of(session)
        model: Any = session.model
        ffn = model.decoder.layers["0"].mlp
        caught: dict[str, Tensor] = {}
        handle = ffn.register_forward_hook(lambda _, args, y: caught.update(x=args[0], y=y))
        hidden_of(session, batch)
        handle.remove()
        with torch.no_grad():
            for row in range(4):
                for at in range(int(batch["valid"][row].sum())):
                    layer = ffn.image if batch["image_index"][row, at] >= 0 else ffn.text
                    expected = plain_experts(layer, caught["x"][row, at])
                    torch.testing.assert_close(caught["y"][row, at], expected, **CLOSE)
        assert not caught["y"][~batch["valid"]].any()


@pytest.mark.packages("moe", "vlm")
@each_fusion
def test_nothing_that_is_not_there_changes_anything(folder: Path, more: dict[str, Any]) -> None:
    with session_of(folder, **more) as session:
        drawn(session)
        batch = batch_of(session)
        found = hidden_of(session, batch)
        pixels = torch.where(batch["present"][..., None, None, None], batch["pixels"], 77).to(torch.uint8)
        tokens = torch.where(batch["valid"], batch["tokens"], 5)
        changed = hidden_of(session, batch, pixels=pixels, tokens=tokens)
        torch.testing.assert_close(changed[batch["valid"]], found[batch["valid"]], **CLOSE)
        other = hidden_of(session, batch, pixels=255 - batch["pixels"])
        assert not torch.allclose(other[0], found[0])
        torch.testing.assert_close(other[[1, 3]], found[[1, 3]], **CLOSE)


@pytest.mark.packages("moe", "vlm")
@pytest.mark.parametrize("more", [*EVERY, *FURTHER])
def test_rows_generate_together_what_they_do_without_a_cache(folder: Path, more: dict[str, Any]) -> None:
    with session_of(folder, **more) as session:
        drawn(session)
        batch = batch_of(session)
        prompts, _ = questions_of(batch)
        found = generate(session.model, prompts, max_new_tokens=4, temperature=0.0)
        model: Any = session.model
        for step in range(4):
            with torch.no_grad():
                for row, length in enumerate(prompts.lengths):
                    valid = torch.arange(batch["tokens"].shape[1]) < length + step
                    one = {name: value[row : row + 1].clone() for name, value in batch.items()}
                    one["valid"] = valid[None]
                    one["tokens"][0, length : length + step] = torch.tensor(
                        found[row][:step], dtype=torch.int64
                    )
                    one["image_index"][0, length:] = -1
                    one["documents"] = torch.where(one["valid"], 0, 1).int()
                    one["positions"] = torch.arange(len(valid))[None]
                    hidden = hidden_of(session, one)
                    expected = int(model.logits(hidden[:, length + step - 1]).argmax())
                    assert found[row][step] == expected, (row, step)


def test_cross_attention_that_would_see_nothing_is_refused(folder: Path) -> None:
    vlm = {"fusion": "cross_attention", "cross_attention": {"every": 3}}
    with pytest.raises(ConfigError, match=r"no block would see images: 3 is more than model\.n_layers = 2"):
        config_of(folder, Plugins(), vlm=vlm)


def test_moma_without_experts_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="takes its experts from"):
        config_of(folder, Plugins(), vlm=MOMA)


def test_a_fusion_of_somebody_else_is_taken(folder: Path) -> None:
    from vlmkit import third_party

    plugins = third_party()
    vlm = {"fusion": "mine/halved"}
    with tiny_session(config_of(folder, plugins, vlm=vlm, mine={}), plugins) as session:
        session.model.eval()
        batch = batch_of(session)
        found = hidden_of(session, batch)
    with session_of(folder) as joint:
        expected = hidden_of(joint, batch)
        torch.testing.assert_close(found[[1, 3]], expected[[1, 3]], **CLOSE)
        assert not torch.allclose(found[0], expected[0])
