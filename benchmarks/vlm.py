"""Cost of seeing: a step over the sum of a bare encoder's and a bare decoder's, and reading images.

The bare step runs the same encoder, connector and decoder on the same micro-batch, forward and backward, with
AdamW, and nothing else. Reading: a worker's rows of prepared pictures over a plain Pillow loop that opens,
resizes and converts the same files. Goals: see GOALS.

usage: python benchmarks/vlm.py [--json] [--check] [--pairs N] [--dim N] [--threads N]
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from _common import Goal, Report, arguments, paired
from PIL import Image

from forge_core.plugins import Plugins
from forge_core.testing import tiny_config
from forge_vlm.model import IMAGE_KEYS

GOALS = {
    "step": Goal("step over a bare encoder and decoder", 1.1),
    "read": Goal("time to read images over a plain Pillow loop", 1 / 0.9),
}
ROWS, LENGTH, PICTURES, SIDE, SIZE = 8, 192, 64, 640, 128


def write(folder: Path) -> None:
    """JPEG files of noise and gradients, and what is said of them."""
    random = np.random.default_rng(0)
    lines = []
    for number in range(PICTURES):
        coarse = random.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        picture = Image.fromarray(coarse).resize((SIDE, SIDE * 3 // 4), Image.Resampling.BICUBIC)
        picture.save(folder / f"{number}.jpg", quality=90)
        lines.append(json.dumps({"image": f"{number}.jpg", "prompt": "What is it? ", "answer": "noise " * 8}))
    (folder / "data.jsonl").write_text("\n".join(lines * 8), encoding="utf-8")


def session(stack: ExitStack, folder: Path, dim: int) -> Any:
    """A built session of a model that sees."""
    from forge_core.loop.build import build_session, new_session

    plugins = Plugins()
    vit = {"image_size": SIZE, "patch_size": 16, "dim": dim, "n_layers": 4, "n_heads": 4}
    tables: dict[str, Any] = {
        "model": {"dim": dim, "n_layers": 4, "n_heads": 4, "ffn_hidden_dim": dim * 3},
        "vlm": {"encoder": {"frozen": False, "vit": vit}},
        "data": {"source": "vlm/images", "path": str(folder), "tokenizer": "bytes", "holdout": 0.0},
        "train": {"batch_size": ROWS, "seq_len": LENGTH, "max_steps": 100000, "dtype": "fp32"},
        "metrics": {"log_interval": 1000},
    }
    config = tiny_config(plugins=plugins, **tables)
    return build_session(new_session(config, plugins, stack))


def whole(found: Any) -> Callable[[], None]:
    """Runs one update, as the loop does."""

    def step() -> None:
        found.step += 1
        found.step_fn.train(found, found.step)

    return step


def bare(found: Any) -> Callable[[], None]:
    """The same parts in a plain loop, on one micro-batch again and again."""
    model = found.model
    batch = found.stream.take(1)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    images = {name: batch[name] for name in IMAGE_KEYS if name in batch}

    def step() -> None:
        pixels = (images["pixels"][:, 0].float() / 255 - 0.5) / 0.5
        features = model.connector(model.encoder(pixels))
        text = model.decoder.embed(batch["tokens"][:, features.shape[1] :])
        hidden = model.decoder(embeds=torch.cat((features, text), 1))
        logits = model.decoder.head(hidden).flatten(0, 1)
        F.cross_entropy(logits, batch["targets"].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def readers(found: Any, folder: Path) -> tuple[Callable[[], None], Callable[[], None]]:
    """Plain and ours, 16 pictures each."""
    source = found.data.train.sources[0]

    def plain() -> None:
        for number in range(16):
            with Image.open(folder / f"{number}.jpg") as picture:
                small = picture.convert("RGB").resize((SIZE, SIZE), Image.Resampling.BILINEAR)
            np.ascontiguousarray(np.asarray(small).transpose(2, 0, 1))

    def ours() -> None:
        for number in range(16):
            source[number]

    return plain, ours


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--dim", type=int, default=256, help="width of encoder and decoder")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report = Report("vlm", ["case", "value", "95 %", "goal"])
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write(folder)
        found = session(stack, folder, options.dim)
        steps = paired(bare(found), whole(found), options.pairs or 30, budget=300)
        report.ratio("step", GOALS["step"], steps.ratio())
        plain, ours = readers(found, folder)
        report.ratio("read", GOALS["read"], paired(plain, ours, options.pairs or 30, budget=120).ratio())
    report.finish(options)


if __name__ == "__main__":
    main()
