"""Runs that start from a folder of weights, on one process or in the workers of a pool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from ckptkit import plugins_for
from ckptkit import run as run_checkpointed
from rankskit import AtBegin, whole
from torch import Tensor

from forge_ckpt.hf.exporting import export_hf
from forge_ckpt.hf.opening import Opened
from forge_ckpt.hf.start import tensors_of
from forge_ckpt.hf.weights import InMemory
from forge_core.config.tables import ModelConfig
from forge_core.model import build_decoder, default_parts, initialise
from forge_core.testing import tiny_config

SIZES: dict[str, Any] = {
    "dim": 16,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 4,
    "ffn_hidden_dim": 32,
    "vocab_size": 64,
    "max_seq_len": 16,
    "init_std": 0.2,
}
GEMMA = {
    "norm_unit_offset": True,
    "block_norm": "sandwich",
    "activation": "gelu_tanh",
    "gated_mlp": True,
    "embedding_scale": 4.0,
    "tie_embeddings": True,
    "attention_scale": 0.25,
    "sliding_window": 4,
    "layer_types": ["sliding", "full"],
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True, "tie_embeddings": True},
    "gemma2": {**GEMMA, "attention_softcap": 2.0, "logit_softcap": 3.0},
    "gemma3_text": {**GEMMA, "qk_norm": True, "rope_theta": 1e6, "rope_theta_sliding": 1e3},
    "olmo2": {"block_norm": "post", "qk_norm": True, "qk_norm_over": "all_heads"},
}


def write_folder(family: str, out: Path) -> dict[str, Tensor]:
    """A Hugging Face folder of a random model in which no norm is 1 and no bias 0; its weights."""
    plugins = plugins_for()
    config = tiny_config(plugins=plugins, model={**SIZES, **FAMILIES[family]})
    model = config[ModelConfig]
    decoder = build_decoder(model, default_parts(model))
    initialise(decoder, 5, model.init_std, model.n_layers)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=random))
    weights = {name: tensor.detach() for name, tensor in tensors_of(decoder).items()}
    opened = Opened(where="memory", kind="memory", config=config, plugins=plugins, weights=InMemory(weights))
    export_hf(opened, out, model_type=family)
    return weights


def start(folder: str, place: str, family: str, layout: dict[str, Any], rows: int) -> list[Any]:
    """Two updates from the weights at `place`: weights at the start, whole, and losses."""
    begin = AtBegin()
    done = run_checkpointed(
        Path(folder),
        plugins=plugins_for(hooks={"observers": [begin]}),
        steps=2,
        checkpoint={"interval": 0},
        distributed=layout,
        train={"batch_size": rows, "dtype": "fp64", "max_steps": 2, "seq_len": 16},
        model={**SIZES, **FAMILIES[family], "init_from": place},
        optimizer={"lr": 1e-2},
    )
    weights = {name: tensor for name, tensor in begin.values.items() if name.startswith("model/")}
    return [weights, done.losses, {name: whole(p) for name, p in done.session.freeze.named.items()}]
