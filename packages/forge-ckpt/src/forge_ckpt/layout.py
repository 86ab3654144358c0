"""Names of folders and files: `checkpoints/step_00000100/` and what is in it. Imports no torch."""

from __future__ import annotations

import re

FOLDER = "checkpoints"
LATEST = "latest"
MANIFEST = "manifest.json"
INDEX = "index.json"
STATE = "state.json"
CONFIG = "config.toml"
EXTRAS = "extras"

_STEP = re.compile(r"step_(\d{8,})\Z")
_UNFINISHED = re.compile(r"\.(?:saving|replaced)_step_\d{8,}_[0-9a-f]+\Z")


def step_name(step: int) -> str:
    """Folder of the checkpoint after update `step`."""
    return f"step_{step:08d}"


def step_of(name: str) -> int | None:
    """The update whose checkpoint has this name, None for any other name."""
    match = _STEP.match(name)
    return int(match[1]) if match else None


def saving_name(step: int, token: str) -> str:
    """Folder of a checkpoint while it is being written."""
    return f".saving_{step_name(step)}_{token}"


def replaced_name(step: int, token: str) -> str:
    """Folder of a checkpoint that makes room for another of the same step."""
    return f".replaced_{step_name(step)}_{token}"


def is_unfinished(name: str) -> bool:
    """Whether this is what a save that died left behind."""
    return _UNFINISHED.match(name) is not None


def rank_file(what: str, rank: int) -> str:
    """File of one rank: what is weights, optimizer, extras or state."""
    return f"{what}_{rank:05d}.safetensors"
