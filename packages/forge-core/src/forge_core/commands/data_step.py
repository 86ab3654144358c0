"""`forge data inspect RUN --step N`: what an update of a run saw."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from forge_core.commands.loading import load
from forge_core.errors import UsageError

SHOWN = 300
"""Characters of a sequence that are shown without --samples."""


def run(arguments: argparse.Namespace, flags: list[str]) -> int:
    """Print the sequences of an update: where each was trained on, what it is, its documents and text."""
    from forge_core.data.inspect_step import seen_in_step
    from forge_core.data.wording import counted
    from forge_core.plugins import PluginCatalog

    folder = Path(arguments.source)
    if not (folder / "config.toml").is_file():
        raise UsageError(f"{folder} is no folder of a run: it holds no config.toml", "e.g. runs/mine")
    if flags:
        raise UsageError(f"a run has its configuration, and takes no {flags[0]}")
    config, plugins = load(str(folder / "config.toml"), [])
    catalog = PluginCatalog(plugins)

    def component(category: str, name: str) -> Any:
        return catalog.load(category, name)

    seen = seen_in_step(folder, config, component, arguments.step)
    if arguments.json:
        import attrs

        print(json.dumps({"step": arguments.step, "samples": [attrs.asdict(each) for each in seen]}))
        return 0
    tokens = sum(len(each.tokens) for each in seen)
    print(
        f"update {arguments.step}: {counted(len(seen), 'sequence')}, {counted(tokens, 'token')}, "
        f"samples from {seen[0].position}"
    )
    for number, each in enumerate(seen):
        documents = f", documents {', '.join(each.documents)}" if each.documents else ""
        print(
            f"micro-batch {each.micro_batch} rank {each.data_rank} row {each.row}: "
            f"sample {each.sample} of {each.source}, {each.supervised} supervised tokens{documents}"
        )
        if number < arguments.samples:
            print("    " + each.text.replace("\n", "\n    "))
        else:
            print("    " + json.dumps(each.text[:SHOWN], ensure_ascii=False))
    return 0
