"""What a launcher tells a process through the environment. Imports no torch."""

from __future__ import annotations

import os

import attrs

from forge_core.errors import ForgeError

VARIABLES = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
HOW = "start with `forge train --nproc N`, torchrun or `forge launch slurm`, which set them all"


@attrs.frozen(kw_only=True)
class Environment:
    """A process among those of the run.

    Attributes:
        rank, world_size: among all processes. local_rank: among those of this machine.
        address: "host:port" where the processes meet; "" for one process.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    address: str = ""


def world_size_from_environment() -> int:
    """Processes that a launcher started, from WORLD_SIZE; 1 without a launcher.

    Raises:
        ForgeError: it is no number.
    """
    return _number("WORLD_SIZE", "1", least=1)


def read_environment() -> Environment:
    """The place of this process as the launcher says.

    Raises:
        ForgeError: variables are missing, are no numbers or contradict each other; names them.
    """
    world = world_size_from_environment()
    if world == 1:
        return Environment()
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        raise ForgeError(f"WORLD_SIZE={world}, but {' and '.join(missing)} not set", HOW)
    rank, local = _number("RANK"), _number("LOCAL_RANK")
    port = _number("MASTER_PORT", least=1)
    if rank >= world:
        raise ForgeError(f"RANK={rank} is not below WORLD_SIZE={world}", HOW)
    if local > rank:
        raise ForgeError(f"LOCAL_RANK={local} is above RANK={rank}", HOW)
    if port > 65535:
        raise ForgeError(f"MASTER_PORT={port} is no port", "1 to 65535")
    address = f"{os.environ['MASTER_ADDR']}:{port}"
    return Environment(rank=rank, world_size=world, local_rank=local, address=address)


def _number(name: str, default: str = "", least: int = 0) -> int:
    text = os.environ.get(name, default)
    if not text.isdigit() or int(text) < least:
        raise ForgeError(f"{name}={text!r} is not a number of at least {least}", HOW)
    return int(text)
