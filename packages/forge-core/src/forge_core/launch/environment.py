"""The variables by which a process learns its rank: RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE,
MASTER_ADDR and MASTER_PORT, as torchrun sets them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

from forge_core.errors import UsageError
from forge_core.launch.status import STATUS_FILE

PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Else torch warns with hundreds of lines of every look at the meeting place of a rank 0 that is gone."""
LOWEST_PORT, PORTS = 15_000, 17_000
"""Ports for jobs of Slurm: below those that Linux gives to outgoing connections (from 32768)."""


def for_rank(environment: Mapping[str, str], rank: int, size: int, port: int) -> dict[str, str]:
    """The variables of one of `size` ranks on this machine, on top of `environment`."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    kept = {
        name: value
        for name, value in environment.items()
        if not name.startswith("TORCHELASTIC_") and name != STATUS_FILE
    }
    # their output is put together to lines here; rank 0 writes for itself, and whole lines if it may buffer
    at_once = {"PYTHONUNBUFFERED": "1"} if rank else {}
    own = {name: str(value) for name, value in place.items()}
    return {**threads(size), **QUIET, **at_once, **kept, **own}


def threads(size: int) -> dict[str, str]:
    """How ranks share the cores: each has as many threads as cores are left for it, and they wait asleep.

    Threads that wait in a loop take the core from those of another rank, and all become ten times slower.
    """
    return {
        "OMP_NUM_THREADS": str(max(1, cores() // size)),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def adopt_slurm(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Set the variables of torchrun from those of Slurm in a process that srun started as one of several.

    Where a launcher has set RANK or WORLD_SIZE, or there is one task, nothing changes. The ranks meet on the
    first node, at a port that follows from job and step, unless MASTER_ADDR and MASTER_PORT say otherwise.

    Returns:
        Whether variables were set.

    Raises:
        UsageError: variables are missing; or this is the batch script of a job, and none of its tasks.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or "1"
    launched = "RANK" in environment or "WORLD_SIZE" in environment
    if launched or "SLURM_PROCID" not in environment or tasks == "1":
        return False
    if "SLURM_STEP_ID" not in environment and "SLURMD_NODENAME" in environment:
        raise UsageError(
            f"this is the batch script of a job of {tasks} tasks, and none of them",
            "put srun before the command, or ask for one task",
        )
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST")
    address = environment.get("MASTER_ADDR") or (first_node(nodes) if nodes else "")
    if not address:
        raise UsageError("neither SLURM_JOB_NODELIST nor MASTER_ADDR says where the ranks meet")
    environment.update(
        {
            "RANK": environment["SLURM_PROCID"],
            "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
            "WORLD_SIZE": tasks,
            "LOCAL_WORLD_SIZE": str(_tasks_here(environment, tasks)),
            "MASTER_ADDR": address,
            "MASTER_PORT": environment.get("MASTER_PORT") or str(_port(environment)),
        }
    )
    return True


def first_node(nodes: str) -> str:
    """The first host of a list as Slurm writes it: `gpu[03-05,9],login` is gpu03."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])+", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first.group() if first else "")


def _tasks_here(environment: Mapping[str, str], tasks: str) -> int:
    """Tasks on this node, from `4(x2),3`: two nodes of 4 tasks, one of 3."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE") or tasks
    node = int(environment.get("SLURM_NODEID", "0"))
    counts: list[int] = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(count)] * int(repeat or 1)
    return counts[node] if node < len(counts) else counts[0]


def _port(environment: Mapping[str, str]) -> int:
    """The same on every task of a step, another for other steps and jobs (that are less than 1000 apart)."""
    job, step = (environment.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    digits = [int(text) if text.isdigit() else 0 for text in (job, step)]
    return LOWEST_PORT + (17 * digits[0] + digits[1]) % PORTS


def restarts(environment: Mapping[str, str] = os.environ) -> int:
    """How often torchrun or Slurm has started this run's processes anew; 0 the first time."""
    counts = [environment.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")]
    return sum(int(text) for text in counts if text.isdigit())
