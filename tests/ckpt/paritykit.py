"""Models of Hugging Face beside ours: random weights, each from the other's folder, and what must agree."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

TEXT, SEEING = "AutoModelForCausalLM", "AutoModelForImageTextToText"
"""Their classes of models."""
SIZES: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""What configurations of tiny text models have in common."""
MLA: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
    "kv_lora_rank": 12,
    "q_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
"""And of those of DeepSeek V3."""
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


def random_model(kind: str, name: str, **keys: Any) -> Any:
    """A model of transformers in evaluation mode whose every parameter is random.

    Args:
        kind: `TEXT` or `SEEING`. name: the `model_type`. keys: of its configuration.
    """
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    config = transformers.AutoConfig.for_model(name, **keys)
    model = getattr(transformers, kind).from_config(config, attn_implementation="eager").eval()
    randomise(model, 7)
    return model


def exported(opened: Any, model: nn.Module, out: Path, **options: Any) -> str:
    """Writes a folder as one with the weights of `model`, without a tokenizer; the `model_type` that it got.

    Args:
        options: of `export_hf`.
    """
    from forge_ckpt.hf.exporting import export_hf
    from forge_ckpt.hf.start import tensors_of
    from forge_ckpt.hf.weights import InMemory

    source = attrs.evolve(opened, weights=InMemory(tensors_of(model)), tokenizer=None)
    return export_hf(source, out, **options).model_type


def loaded(kind: str, folder: Path) -> Any:
    """By transformers, of the class that the folder names, with a weight for every parameter and no other."""
    transformers = pytest.importorskip("transformers")
    model, report = getattr(transformers, kind).from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert type(model).__name__ == json.loads((folder / "config.json").read_text())["architectures"][0]
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model.eval()


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
