"""Small models that see, samples for them, and plain references to compare them with."""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from forge_core.config import Config
from forge_core.contract import Component
from forge_core.data.source import SourceSpec
from forge_core.plugins import Plugins
from forge_core.testing import isolated_plugins, plugin_object, tiny_config
from forge_vlm.data.layout import Part, lay_out
from forge_vlm.data.source import Row, image_shape
from forge_vlm.evaluation.metric import Seen, VlmMetric
from forge_vlm.fusions.base import Fusion

Tables = dict[str, dict[str, Any]]
SIZE = 8
TOKENS = 4
"""An image of 8 x 8 pixels in patches of 4."""
TOWER: dict[str, Any] = {
    "image_size": SIZE,
    "patch_size": 4,
    "dim": 16,
    "n_layers": 2,
    "n_heads": 2,
    "hidden_dim": 32,
}
"""A tower of transformers for them."""
VOCABULARY = 64
"""Of random tokens."""


def tables(path: Path | str, **more: dict[str, Any]) -> Tables:
    """Tables of a small run on the samples in a folder, laid over those of `forge_core.testing`."""
    found: Tables = {
        "data": {"source": "vlm/images", "path": str(path), "tokenizer": "bytes", "holdout": 0.0},
        "train": {"dtype": "fp64", "batch_size": 2, "seq_len": 32, "max_steps": 3},
        "model": {"n_kv_heads": 2},
        "vlm": {
            "max_images": 2,
            "encoder": {
                "name": "vit",
                "vit": {"image_size": SIZE, "patch_size": 4, "dim": 16, "n_layers": 1, "n_heads": 2},
            },
        },
        "eval": {"steps": 1},
    }
    for name, table in more.items():
        found[name] = merged(found.get(name, {}), table)
    return found


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` laid over `below`, table by table."""
    found = dict(below)
    for name, value in above.items():
        both = isinstance(value, dict) and isinstance(found.get(name), dict)
        found[name] = merged(found[name], value) if both else value
    return found


def config_of(path: Path | str, plugins: Plugins, *flags: str, **more: dict[str, Any]) -> Config:
    return tiny_config(*flags, plugins=plugins, **tables(path, **more))


def write_samples(folder: Path, records: list[dict[str, Any]], *, seed: int = 0, pictures: int = 6) -> Path:
    """`data.jsonl` with these records, and pictures 0.png, 1.png, ... of random pixels beside it."""
    random = np.random.default_rng(seed)
    for number in range(pictures):
        pixels = random.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "data.jsonl").write_text(lines, encoding="utf-8")
    return folder


def mixed_records(count: int = 24) -> list[dict[str, Any]]:
    """Samples with one image, two (one of them inline), and none, in turn."""
    records: list[dict[str, Any]] = []
    for number in range(count):
        record: dict[str, Any] = {"prompt": f"q{number} ", "answer": f"a{number * 7 % 11}"}
        if number % 4 == 0:
            record["image"] = f"{number % 6}.png"
        elif number % 4 == 2:
            record["images"] = [f"{number % 6}.png", f"{(number + 1) % 6}.png"]
            record["prompt"] = f"a<image> b{number}<image>? "
        records.append(record)
    return records


def third_party() -> Plugins:
    """The installed plugins and one more, `mine`, with an encoder, a fusion, a source and a metric."""
    import forge_vlm.plugin

    parts = [
        Component(
            category="vlm_encoder",
            name="normed",
            target="vlmkit:NormedEncoder",
            options="forge_vlm.options:VitOptions",
            help="Linear, batch norm and dropout.",
        ),
        Component(
            category="vlm_fusion",
            name="halved",
            target="vlmkit:HalvedFusion",
            options="forge_vlm.options:JointOptions",
            help="Visual tokens at half their size.",
        ),
        Component(
            category="data_source",
            name="random",
            target="vlmkit:RandomTokens",
            help="Images and random tokens.",
        ),
        Component(
            category="vlm_metric",
            name="counted",
            target="vlmkit:CountedRows",
            help="Samples with a label.",
        ),
    ]
    found = {"vlm": forge_vlm.plugin, "mine": plugin_object(forge_components=lambda: parts)}
    if find_spec("forge_moe"):
        found["moe"] = import_module("forge_moe.plugin")
    return isolated_plugins(found)


class HalvedFusion(Fusion):
    """The joint one with visual tokens at half their size."""

    def run(
        self,
        decoder: Any,
        tokens: Tensor,
        index: Tensor | None,
        marks: dict[str, Any],
        inputs: dict[str, Any],
    ) -> Tensor:
        return super().run(decoder, tokens, index, {**marks, "features": marks["features"] / 2}, inputs)


class RandomTokens:
    """A source in which nothing can be learnt: an image, and tokens drawn evenly from the vocabulary."""

    def __init__(self, spec: SourceSpec, options: object) -> None:
        self.spec, self.shape = spec, image_shape(spec)
        self.max_token, self.tokens_per_sample = VOCABULARY - 1, float(spec.seq_len)
        self.fingerprint = "random tokens"

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, number: int) -> dict[str, Any]:
        random = np.random.default_rng(number)
        ids = random.integers(0, VOCABULARY, self.spec.seq_len - self.shape.places).tolist()
        parts = [Part(image=0), Part(ids=tuple(ids), learnt=True)]
        laid = lay_out(parts, places=self.shape.places, limit=self.spec.seq_len, eos_id=0)
        row = Row(self.spec.seq_len, self.shape, 0)
        row.add(laid, [random.integers(0, 256, (3, SIZE, SIZE), dtype=np.uint8)])
        return dict(row.finish())


class CountedRows(VlmMetric):
    """How many samples have a label, as somebody else's metric."""

    def measure(self, seen: Seen) -> tuple[float, ...]:
        return (float(sum(bool(right) for right in seen.right)),)

    def result(self, sums: Any) -> dict[str, float]:
        return {"": sums[0]}


class NormedEncoder(torch.nn.Module):
    """A linear layer, batch norm and dropout of 0.5 over patches."""

    def __init__(self, options: Any) -> None:
        super().__init__()
        from forge_core.model import mark

        self.patch = options.patch_size
        self.linear = torch.nn.Linear(3 * self.patch**2, options.dim)
        self.norm = torch.nn.BatchNorm1d(options.dim)
        mark(self.norm, "running_mean", init="zeros")
        mark(self.norm, "running_var", init="ones")
        mark(self.norm, "num_batches_tracked", init="zeros")
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, pixels: Tensor) -> Tensor:
        patches = torch.nn.functional.unfold(pixels, self.patch, stride=self.patch)
        x: Tensor = self.linear(patches.transpose(1, 2))
        y: Tensor = self.dropout(self.norm(x.transpose(1, 2)).transpose(1, 2))
        return y


def images_of(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    from forge_vlm.model import IMAGE_KEYS

    return {name: batch[name] for name in IMAGE_KEYS if name in batch}
