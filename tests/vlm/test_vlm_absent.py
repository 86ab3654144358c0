"""What is not there changes no logit, no count, no route, whatever the fusion."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_vlm_fusions import MOE, drawn, each_fusion
from test_vlm_model import CLOSE, batch_of, images_of, session_of
from torch import Tensor
from vlmkit import mixed_records, write_samples

from forge_core.loop.session import TrainingSession

pytestmark = pytest.mark.packages("moe", "vlm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("samples"), mixed_records())


def trained_on(
    session: TrainingSession, batch: dict[str, Tensor]
) -> tuple[Tensor, dict[str, int], list[Tensor]]:
    """Hidden states of real tokens, counts, and what the experts counted, of one forward while training."""
    drawn(session)
    session.model.train()
    inputs = {name: batch[name] for name in ("positions", "documents", "valid")}
    hidden = session.model(batch["tokens"], images=images_of(batch), apart=True, **inputs)
    tallies = [m.tally.clone() for m in session.model.modules() if hasattr(m, "tally")]
    return hidden.detach()[batch["valid"]], session.forward.count(batch), tallies


@each_fusion
def test_room_for_more_images_and_more_text_changes_nothing(folder: Path, more: dict[str, Any]) -> None:
    with session_of(folder, **more) as session:
        expected, counts, tallies = trained_on(session, batch_of(session))
    wider = {**more, "vlm": {**more["vlm"], "max_images": 5}, "train": {"seq_len": 48}}
    with session_of(folder, **wider) as session:
        batch = batch_of(session)
        assert batch["pixels"].shape[1] == 5
        found, counted, routed = trained_on(session, batch)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)
    assert counted == counts
    assert counts["images"] == 3
    assert len(routed) == len(tallies) == (4 if "moe" in more else 0)
    for one, other in zip(routed, tallies, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
        assert other[:4].sum() > 0


@pytest.mark.parametrize("fusion", ["joint", "mot"])
def test_padding_is_routed_nowhere(folder: Path, fusion: str) -> None:
    """Experts in a decoder that sees: two a token, of text and images, and none for padding."""
    with session_of(folder, vlm={"fusion": fusion}, moe=MOE) as session:
        batch = batch_of(session)
        _, counts, tallies = trained_on(session, batch)
        layers = session.config.get("model").n_layers
        total = sum(float(tally[:4].sum()) for tally in tallies)
        assert total == layers * 2 * counts["positions"]
        assert counts["positions"] == int(batch["valid"].sum())


@each_fusion
def test_samples_with_nothing_that_can_be_seen_are_finite(tmp_path: Path, more: dict[str, Any]) -> None:
    records = [{"images": ["0.png", "lost.png"], "prompt": "a", "answer": f"b{n}"} for n in range(8)]
    data = {"vlm/images": {"unreadable": "mask"}}
    with session_of(write_samples(tmp_path, records), data=data, **more) as session:
        session.model.train()
        batch = batch_of(session)
        assert not batch["present"].any()
        output = session.forward(session.model, batch)
        assert float(output.loss_sum.detach()) == 0
        assert output.hidden is not None
        assert bool(output.hidden.isfinite().all())
        output.loss_sum.backward()  # type: ignore[no-untyped-call]
        for name, parameter in session.model.named_parameters():
            if parameter.grad is not None:
                assert not parameter.grad.any(), name
        counts = session.forward.count(batch)
        assert (counts["tokens"], counts["images"], counts["unreadable"]) == (0, 0, 4)
