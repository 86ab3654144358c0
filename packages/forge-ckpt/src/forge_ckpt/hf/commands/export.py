"""`forge export`."""

from __future__ import annotations

import argparse
from pathlib import Path

from forge_core.commands.command import Command


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("place", metavar="RUN", help="run folder, checkpoint, or folder of forge import")
    parser.add_argument("--to", choices=("hf",), default="hf", help="format; hf is Hugging Face's")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write; must not exist")
    parser.add_argument(
        "--model-type", metavar="NAME", help="architecture, such as llama; default: the first that fits"
    )
    parser.add_argument("--dtype", metavar="TYPE", help="bf16, fp16 or fp32; default: as saved")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file; default: 5GB")


def run(arguments: argparse.Namespace, flags: list[str]) -> int:
    from forge_ckpt.hf.exporting import export_hf
    from forge_ckpt.hf.opening import open_model

    written = export_hf(
        open_model(arguments.place, flags),
        Path(arguments.out),
        model_type=arguments.model_type,
        dtype=arguments.dtype,
        max_shard_size=arguments.max_shard_size,
        told=lambda file: print(f"  {file}", flush=True),
    )
    for notice in written.notices:
        print(f"note: {notice}")
    size = f"{written.bytes / 1e9:.3g} GB" if written.bytes >= 1e8 else f"{written.bytes / 1e6:.3g} MB"
    print(f"{arguments.out}: {written.model_type}, {written.tensors} tensors, {size}")
    return 0


COMMAND = Command(
    description="Write a model as a Hugging Face folder: safetensors with an index, config.json for\n"
    "transformers 4 and 5, generation_config.json, the tokenizer's files. One tensor is in memory at a time.",
    examples="examples:\n"
    "  forge export runs/mine --out mine-hf --dtype bf16\n"
    "  forge export runs/mine/checkpoints/step_00001000 --out mine-hf --model-type mistral",
    run=run,
    arguments=arguments,
    takes_flags=True,
)
