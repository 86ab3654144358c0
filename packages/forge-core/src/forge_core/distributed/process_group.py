"""The process group of a run: meeting the other processes, timeouts, the end."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore, Store, _set_pg_timeout
from torch.distributed.rendezvous import _create_c10d_store

from forge_core.distributed.environment import Environment, read_environment
from forge_core.distributed.failure import PeerError, Watch
from forge_core.distributed.lifelines import Lifelines
from forge_core.errors import ForgeError

if TYPE_CHECKING:
    from forge_core.config.tables import DistributedConfig

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
EARLIER = 0.9
SILENCE = 8.0
"""Seconds within which the process that keeps the meeting place answers; it does nothing else meanwhile."""


class Processes:
    """All processes of the run, as this one sees them.

    Attributes:
        environment: the place of this process.
        store: key-value store that all processes reach; None for one process and for a group that was there
            before.
        watch: over the other processes, from the meeting on; None without a store.
        owned: whether the process group was made here, and so is destroyed at the end.
    """

    def __init__(
        self, environment: Environment, store: Store | None = None, watch: Watch | None = None
    ) -> None:
        self.environment = environment
        self.store, self.watch = store, watch
        self.owned = store is not None

    @property
    def connected(self) -> bool:
        """Whether there are others, and a process group over all."""
        return self.environment.world_size > 1

    def set_timeout(self, seconds: float, first: dist.ProcessGroup | None = None) -> None:
        """Let collectives of all groups fail after `seconds`, and those of `first` a little earlier.

        A host runs ahead of an accelerator, and so waits for a rank that is stuck in the step's small
        reduction. That should fail with the names of the missing, before the accelerator's watchdog ends the
        process. Groups that were there before the run are left as they are.
        """
        if not self.owned:
            return
        for group in list(dist.distributed_c10d._world.pg_map):
            limit = timedelta(seconds=seconds * (EARLIER if group is first else 1.0))
            with suppress(ValueError):  # this process is no member
                _set_pg_timeout(limit, group)

    def leave(self) -> None:
        """Destroy the groups, if they were made here. Only after success: it waits for the others."""
        if self.owned and dist.is_initialized():
            dist.destroy_process_group()


def find_processes() -> Environment:
    """The place of this process: in the process group that is there, else as the launcher says.

    Raises:
        ForgeError: see `read_environment`.
    """
    if not dist.is_initialized():
        return read_environment()
    local = os.environ.get("LOCAL_RANK", "0")
    return Environment(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=int(local) if local.isdigit() else 0,
    )


def join(environment: Environment, device: torch.device, config: DistributedConfig) -> Processes:
    """Meet the other processes and make the group over all of them; a group that is there is used as it is.

    Raises:
        ForgeError: no such meeting place, another program at it, or not everybody came within
            `distributed.start_timeout`, or (`PeerError`) a process that had come has ended.
    """
    if environment.world_size == 1 or dist.is_initialized():
        return Processes(environment)
    if device.type == "cuda":
        os.environ.setdefault("TORCH_NCCL_TRACE_BUFFER_SIZE", "2000")  # what the flight recorder keeps
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    limit = timedelta(seconds=config.start_timeout)
    watch: Watch | None = None
    try:
        store = _meet(environment, limit)
        watch = _watch(environment, store)
        dist.init_process_group(
            BACKENDS.get(device.type, "gloo"),
            store=PrefixStore("group", store),
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=limit,
            device_id=device if device.type == "cuda" else None,
        )
    except (RuntimeError, ValueError, OSError) as error:
        if watch is not None:
            watch.stop(farewell=False)
            failure = watch.failure()
            if failure is not None:
                raise PeerError(failure) from error
        raise _no_meeting(environment, config.start_timeout, error) from error
    return Processes(environment, store, watch)


def _watch(environment: Environment, store: Store) -> Watch:
    """Look after the others already while the groups are made, for which all wait."""
    rank, host = environment.rank, environment.address.rpartition(":")[0]
    watch = Watch(store, rank, environment.world_size, Lifelines(store, rank, host))
    watch.start()
    return watch


def _meet(environment: Environment, limit: timedelta) -> Store:
    host, _, port = environment.address.rpartition(":")
    if environment.rank:
        _knock(host, int(port), limit.total_seconds())
    store = _create_c10d_store(host, int(port), environment.rank, environment.world_size, limit)
    # an agent of torchrun outlives its processes and keeps their keys: each start gets keys of its own
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    found: Store = PrefixStore(f"forge/{attempt}", store)
    found.add("arrived", 1)
    return found


def _knock(host: str, port: int, seconds: float) -> None:
    """Wait until rank 0 keeps the meeting place. For a listener that never answers, which is another program,
    torch's client waits without end, whatever its timeout.

    Raises:
        TimeoutError: nobody listens there in time.
        ForgeError: another program does.
    """
    limit = time.monotonic() + seconds
    while not _listens(host, port):
        if time.monotonic() > limit:
            raise TimeoutError("timed out: nobody listens there")
        time.sleep(0.1)
    answered: list[bool] = []

    def ask() -> None:
        with suppress(RuntimeError):
            TCPStore(host, port, is_master=False, wait_for_workers=False)
            answered.append(True)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(SILENCE)
    if not answered and _listens(host, port):  # where it has gone meanwhile, torch tells
        raise ForgeError(
            f"what listens at MASTER_ADDR:MASTER_PORT = {host}:{port} is not rank 0 of this run: it does not "
            f"answer within {SILENCE:g} s",
            "the port is in use: set MASTER_PORT to a free one, or leave it out",
        )


def _listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=SILENCE).close()
    except OSError:
        return False
    return True


def _no_meeting(environment: Environment, seconds: float, error: Exception) -> ForgeError:
    where = f"rank {environment.rank} of {environment.world_size} at MASTER_ADDR:MASTER_PORT = "
    text, reason = f"{where}{environment.address}", str(error).splitlines()[0] if str(error) else ""
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        return ForgeError(f"{text}: the port is in use", "set MASTER_PORT to a free one, or leave it out")
    if _unknown_host(environment):
        return ForgeError(f"{text}: no such host", "set MASTER_ADDR to the machine of rank 0")
    if "timed out" in str(error).lower() or "timeout" in str(error).lower():
        hint = "a process died or never started, or its network does not reach this address"
        return ForgeError(
            f"{text}: not all processes met within distributed.start_timeout = {seconds:g} s", hint
        )
    return ForgeError(f"{text}: the processes cannot meet: {reason}")


def _unknown_host(environment: Environment) -> bool:
    host = environment.address.rpartition(":")[0]
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return True
    return False
