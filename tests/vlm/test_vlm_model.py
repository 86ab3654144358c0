"""The joint decoder against plain references, and what must not change it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from vlmkit import TOKENS, config_of, images_of, mixed_records, write_samples

from forge_core.errors import ConfigError, DataError
from forge_core.loop.session import TrainingSession
from forge_core.plugins import Plugins
from forge_core.testing import run_tiny, tiny_session
from forge_vlm.generate import generate, questions_of

CLOSE = {"rtol": 1e-9, "atol": 1e-9}


@contextmanager
def session_of(folder: Path, *flags: str, **more: dict[str, Any]) -> Iterator[TrainingSession]:
    plugins = Plugins()
    with tiny_session(config_of(folder, plugins, *flags, **more), plugins) as session:
        session.model.eval()
        yield session


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("samples"), mixed_records())


def batch_of(session: TrainingSession) -> dict[str, Tensor]:
    """Four samples: one image, none, two, none."""
    source = session.data.train.sources[0]  # type: ignore[attr-defined]
    rows = [source[number] for number in range(4)]
    return {name: torch.stack([torch.as_tensor(row[name]) for row in rows]) for name in rows[0]}


def hidden_of(session: TrainingSession, batch: dict[str, Tensor], **changed: Tensor) -> Tensor:
    whole = {**batch, **changed}
    inputs = {name: whole[name] for name in ("positions", "documents", "valid")}
    with torch.no_grad():
        found: Tensor = session.model(whole["tokens"], images=images_of(whole), apart=True, **inputs)
    return found


def plain_joint(model: Any, batch: dict[str, Tensor], row: int) -> Tensor:
    """Hidden states of one row's real tokens: encode each image alone, put it where it stands, decode."""
    length = int(batch["valid"][row].sum())
    pieces, slot, at = [], 0, 0
    while at < length:
        if batch["image_index"][row, at] >= 0:
            pixels = batch["pixels"][row, slot].double() / 255
            pieces.append(model.connector(model.encoder(((pixels - 0.5) / 0.5)[None]))[0])
            slot, at = slot + 1, at + TOKENS
        else:
            pieces.append(model.decoder.embed(batch["tokens"][row, at])[None])
            at += 1
    found: Tensor = model.decoder(embeds=torch.cat(pieces)[None])[0]
    return found


def test_joint_equals_a_plain_loop(folder: Path) -> None:
    with session_of(folder) as session:
        batch = batch_of(session)
        found = hidden_of(session, batch)
        for row in range(4):
            with torch.no_grad():
                expected = plain_joint(session.model, batch, row)
            torch.testing.assert_close(found[row, : len(expected)], expected, **CLOSE)


def test_padding_and_empty_slots_change_nothing(folder: Path) -> None:
    with session_of(folder) as session:
        batch = batch_of(session)
        found = hidden_of(session, batch)
        pixels = torch.where(batch["present"][..., None, None, None], batch["pixels"], 77).to(torch.uint8)
        tokens = torch.where(batch["valid"], batch["tokens"], 5)
        changed = hidden_of(session, batch, pixels=pixels, tokens=tokens)
        torch.testing.assert_close(changed[batch["valid"]], found[batch["valid"]], **CLOSE)


def test_an_image_matters_and_a_later_token_does_not(folder: Path) -> None:
    with session_of(folder) as session:
        batch = batch_of(session)
        found = hidden_of(session, batch)
        pixels = 255 - batch["pixels"]
        assert not torch.allclose(hidden_of(session, batch, pixels=pixels)[0], found[0])
        tokens = batch["tokens"].clone()
        place = int(batch["valid"][0].sum()) - 1
        tokens[0, place] = 7
        changed = hidden_of(session, batch, tokens=tokens)
        torch.testing.assert_close(changed[0, :place], found[0, :place], **CLOSE)


@pytest.mark.parametrize("how", ["image", "prefix"])
def test_bidirectional_tokens_see_later_ones_and_others_do_not(folder: Path, how: str) -> None:
    """The gradient of what a position gives says which positions it sees."""
    with session_of(folder, vlm={"joint": {"bidirectional": how}}) as session:
        batch = {name: value[2:3] for name, value in batch_of(session).items()}  # a<image> b2<image>?
        model: Any = session.model
        caught: list[Tensor] = []

        def catch(module: Any, args: Any, kwargs: Any) -> Any:
            leaf = kwargs["embeds"].detach().requires_grad_()
            caught.append(leaf)
            return args, {**kwargs, "embeds": leaf}

        handle = model.decoder.register_forward_pre_hook(catch, with_kwargs=True)
        inputs = {name: batch[name] for name in ("positions", "documents", "valid")}
        hidden = model(batch["tokens"], images=images_of(batch), **inputs)
        handle.remove()
        length = int(batch["valid"].sum())
        index, prompt = batch["image_index"][0], batch["prompt"][0]
        for q in range(length):
            (seen,) = torch.autograd.grad(hidden[0, q].sum(), caught[0], retain_graph=True)
            sees = seen[0].abs().sum(-1) > 0
            for k in range(length):
                same = bool(index[q] >= 0) and bool(index[q] // TOKENS == index[k] // TOKENS)
                allowed = k <= q or (same if how == "image" else bool(prompt[q] & prompt[k]))
                assert bool(sees[k]) == allowed, (q, k)
            assert not sees[length:].any()


def test_generation_with_a_cache_equals_one_without(folder: Path) -> None:
    with session_of(folder) as session:
        batch = batch_of(session)
        prompts, answers = questions_of(batch)
        assert [bytes(answer[:-1]) for answer in answers] == [b"a0", b"a7", b"a3", b"a10"]
        found = generate(session.model, prompts, max_new_tokens=5, temperature=0.0)
        model: Any = session.model
        for row in range(4):
            count = prompts.lengths[row]
            one = {name: value[row : row + 1] for name, value in batch.items()}
            one["valid"] = torch.arange(one["tokens"].shape[1])[None] < count
            one["tokens"] = one["tokens"].clone()
            for step in range(5):
                hidden = plain_joint(model, one, 0)
                token = int(model.logits(hidden)[-1].argmax())
                assert token == found[row][step], (row, step)
                one["tokens"][0, count + step] = token
                one["valid"][0, count + step] = True
                one["image_index"][0, count + step] = -1


def test_a_frozen_encoder_moves_no_bit_and_stays_in_evaluation_mode(folder: Path) -> None:
    plugins = Plugins()
    with tiny_session(config_of(folder, plugins), plugins) as session:
        before = {name: p.detach().clone() for name, p in session.freeze.named.items()}
    more: dict[str, Any] = {"optimizer": {"weight_decay": 0.1}, "eval": {"interval": 2}}
    done = run_tiny(config_of(folder, plugins, **more), plugins, steps=4)
    moved = {name for name, value in done.weights.items() if not torch.equal(value, before[name])}
    assert not any(name.startswith("encoder.") for name in moved)
    assert {"connector.up_proj.weight", "decoder.layers.0.attn.q_proj.weight"} <= moved
    model: Any = done.session.model
    assert not model.encoder.training
    assert model.connector.training
    assert all(p.grad is None for p in model.encoder.parameters())
    state = done.session.optimizers["main"].optimizer.state
    assert not any(p in state for p in model.encoder.parameters())


def test_an_encoder_that_is_unfrozen_later_trains_from_then_on(folder: Path) -> None:
    plugins = Plugins()
    stages = {"stages": [{"start_step": 3, "modules": []}]}
    with tiny_session(config_of(folder, plugins, freeze=stages), plugins) as session:
        before = {name: p.detach().clone() for name, p in session.freeze.named.items()}
    early = run_tiny(config_of(folder, plugins, freeze=stages), plugins, steps=2)
    late = run_tiny(config_of(folder, plugins, freeze=stages), plugins, steps=3)
    name = "encoder.patches.weight"
    assert torch.equal(early.weights[name], before[name])
    assert not torch.equal(late.weights[name], before[name])


def test_a_run_in_which_nothing_is_supervised_ends_with_an_error(tmp_path: Path) -> None:
    records = [{"prompt": "x" * 40, "answer": "a"} for _ in range(20)]
    plugins = Plugins()
    config = config_of(write_samples(tmp_path, records), plugins)
    with pytest.raises(DataError, match="no supervised tokens in the first 5 updates"):
        run_tiny(config, plugins, steps=8)


def test_samples_without_a_label_weigh_nothing_and_are_counted(tmp_path: Path) -> None:
    records = [{"prompt": "x" * 40 if n % 2 else "", "answer": "ab"} for n in range(24)]
    plugins = Plugins()
    config = config_of(write_samples(tmp_path, records), plugins, train={"batch_size": 4})
    done = run_tiny(config, plugins, steps=6)
    assert all(loss > 1 for loss in done.losses)  # a mean over supervised tokens alone, no halves
    shares = done.metric("data/samples_without_label")
    assert 0.2 < sum(shares) / len(shares) < 0.8


def test_a_length_without_room_for_text_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="2 images of 4 tokens leave no room for text in 8 tokens"):
        config_of(folder, Plugins(), train={"seq_len": 8})


@pytest.mark.parametrize(
    ("connector", "options", "tokens"),
    [
        ("linear", {}, 4),
        ("mlp", {}, 4),
        ("average_pool", {"window": 2}, 1),
        ("attentional_pool", {"window": 2, "n_heads": 2}, 1),
        ("pixel_shuffle", {"factor": 2}, 1),
    ],
)
def test_connectors_give_as_many_tokens_as_they_say(
    folder: Path, connector: str, options: dict[str, Any], tokens: int
) -> None:
    with session_of(folder, vlm={"connector": {"name": connector, connector: options}}) as session:
        model: Any = session.model
        batch = batch_of(session)
        features = model.sight.features(model, images_of(batch))
        assert features.shape == (4, 2 * tokens, 16)
        assert (batch["image_index"].max(1).values + 1).tolist() == [tokens, 0, 2 * tokens, 0]


def test_a_connector_that_does_not_fit_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="factor = 3 does not divide its 2 x 2 tokens"):
        config_of(
            folder, Plugins(), vlm={"connector": {"name": "pixel_shuffle", "pixel_shuffle": {"factor": 3}}}
        )


def test_each_part_has_its_own_learning_rate(folder: Path) -> None:
    """The first step of AdamW moves every weight that has a gradient by the learning rate of its group."""
    plugins = Plugins()
    groups = [{"modules": "encoder", "lr_scale": 0.1}, {"modules": "connector", "lr_scale": 10.0}]
    tables: dict[str, Any] = {
        "vlm": {"encoder": {"frozen": False}},
        "optimizer": {"lr": 1e-3, "weight_decay": 0.0, "eps": 1e-30, "groups": groups},
        "scheduler": {"name": "constant", "warmup_steps": 0},
    }
    config = config_of(folder, plugins, **tables)
    with tiny_session(config, plugins) as session:
        before = {name: p.detach().clone() for name, p in session.freeze.named.items()}
    done = run_tiny(config, plugins, steps=1)
    rates = {"encoder": 1e-4, "connector": 1e-2, "decoder": 1e-3}
    for part, rate in rates.items():
        steps = [
            float((done.weights[name] - value).abs().max())
            for name, value in before.items()
            if name.startswith(f"{part}.")
        ]
        assert max(steps) == pytest.approx(rate, rel=1e-3), part
