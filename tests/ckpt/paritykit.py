"""Models of Hugging Face beside ours: random weights, ours from a folder, and what must agree."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

BIASES = ("e_score_correction_bias", "expert_bias")
"""Ends of names of buffers that count as weights."""


@torch.no_grad()
def randomise(model: nn.Module, seed: int) -> None:
    """Draw every parameter and every bias of choices; norms and biases would start as 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(parameter + 0.2 * noise if parameter.ndim == 1 else 0.15 * noise)
    for name, buffer in model.named_buffers():
        if name.endswith(BIASES):
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


def session_of(opened: Any) -> Any:
    """A session whose model has the weights of a folder, in evaluation mode."""
    from forge_ckpt.hf.start import fill
    from forge_core.loop.build import new_session
    from forge_core.loop.inference import build_for_inference, for_one_process

    with ExitStack() as stack:
        session = new_session(for_one_process(opened.config), opened.plugins, stack)
        build_for_inference(session)
    coverage = fill(session.model, opened.weights, opened.where, unknown=opened.unknown)
    assert not coverage.missing
    session.model.eval()
    return session


def ours(opened: Any) -> Any:
    """A model with the weights of a folder."""
    return session_of(opened).model


def batch(rows: int = 2, length: int = 24) -> Tensor:
    """(rows, length) ids; longer than every window of the families that are compared."""
    return torch.randint(0, 99, (rows, length), generator=torch.Generator().manual_seed(1))


def logits_of(model: Any) -> Tensor:
    """Of `batch()`, by a model of either side."""
    with torch.no_grad():
        found = model(batch())
        logits: Tensor = model.logits(found) if hasattr(model, "logits") else found.logits
    return logits


def assert_close(one: Tensor, other: Tensor) -> None:
    """The same to 1e-5, and neither near zero."""
    scale = float(other.abs().max())
    torch.testing.assert_close(one, other, rtol=0, atol=1e-5 * max(scale, 1.0))
    assert scale > 0.5, "logits near zero would agree whatever the model"
