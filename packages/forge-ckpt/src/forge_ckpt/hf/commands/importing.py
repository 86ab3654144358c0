"""`forge import`."""

from __future__ import annotations

import argparse
from pathlib import Path

from forge_core.commands.command import Command


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="HF_DIR", help="folder with config.json and safetensors")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write; must not exist")
    parser.add_argument("--dtype", metavar="TYPE", help="bf16, fp16 or fp32; default: as they are")
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of a file; default: 5GB")
    parser.add_argument(
        "--table-only", action="store_true", help="write model.toml and the tokenizer, no weights"
    )


def run(arguments: argparse.Namespace, flags: list[str]) -> int:
    from forge_ckpt.hf.importing import import_hf

    out = Path(arguments.out)
    written = import_hf(
        Path(arguments.source),
        out,
        dtype=arguments.dtype,
        max_shard_size=arguments.max_shard_size,
        table_only=arguments.table_only,
        told=lambda file: print(f"  {file}", flush=True),
    )
    for notice in written.notices:
        print(f"note: {notice}")
    weights = arguments.source if arguments.table_only else arguments.out
    print(f"{out}: {written.model_type}, {written.tensors} tensors")
    print(f'train from it with extends = "{out}/model.toml" and model.init_from = "{weights}"')
    return 0


COMMAND = Command(
    description="Read a Hugging Face folder: its configuration as a table [model], its weights under our\n"
    "names. Weights come from safetensors alone; pickles are not opened, and no code of the folder is run.",
    examples="examples:\n"
    "  forge import SmolLM2-135M --out smol\n"
    "  forge import SmolLM2-135M --out smol-table --table-only",
    run=run,
    arguments=arguments,
)
