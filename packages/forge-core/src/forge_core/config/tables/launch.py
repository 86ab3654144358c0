"""`[launch]`: the job that `forge launch` makes of a run. `forge train` does not read it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from forge_core.config.fields import evolve, key, table
from forge_core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from forge_core.config.config import Config

LEAD = 60
"""Seconds that the signal comes earlier than the longest save needs."""
LEAD_WITHOUT_DEADLINE = 600
TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<first>\d+)(?::(?P<second>\d{1,2}))?(?::(?P<third>\d{1,2}))?")


@table
class LaunchConfig:
    """The job of a batch system: what it asks for and what it does before the run."""

    account: str | None = key(None, help="Account that pays.", derived="yours by default")
    partition: str | None = key(
        None, help="Partition (queue) of the cluster.", derived="the cluster's default"
    )
    qos: str | None = key(None, help="Quality of service.", derived="the cluster's default")
    nodes: int = key(1, ge=1, help="Nodes.")
    gpus_per_node: int = key(0, ge=0, help="Accelerators of a node; each gets one rank.")
    tasks_per_node: int | None = key(
        None, ge=1, help="Ranks on a node.", derived="gpus_per_node, or 1 without accelerators"
    )
    cpus_per_task: int | None = key(None, ge=1, help="Cores of a rank.", derived="the cluster's default")
    mem: str | None = key(None, help="Memory of a node, e.g. '200G'.", derived="the cluster's default")
    time: str | None = key(
        None,
        help="Time limit, e.g. '24:00:00' or '2-12:00:00'; a requeued job gets it again.",
        derived="the cluster's default",
    )
    output: str = key(
        "%x-%j.out", help="File of the job's output; %x is the run's name, %j the job's number."
    )
    setup: list[str] = key(factory=list, help="Shell lines before the run; the job ends where one fails.")
    sbatch: list[str] = key(factory=list, help="Further options of sbatch, e.g. '--constraint=h200'.")
    srun: list[str] = key(factory=list, help="Further options of srun, e.g. '--container-image=...'.")
    python: list[str] = key(
        factory=list,
        help="Program and arguments in place of the Python that makes the job, e.g. "
        "['apptainer', 'exec', '--nv', 'forge.sif', 'python'].",
    )
    signal_lead: int | None = key(
        None,
        ge=1,
        unit="s",
        help="How long before the time limit the ranks are told to save and end.",
        derived=f"run.save_deadline + {LEAD}, or {LEAD_WITHOUT_DEADLINE} where that is 0",
    )
    requeue: bool = key(
        True, help="Queue the job again when it was stopped with a checkpoint saved (status 75)."
    )

    def resolve(self, config: Config) -> LaunchConfig:
        deadline = config.get("run").save_deadline
        lead, tasks = self.signal_lead, self.tasks_per_node
        if lead is None:
            lead = math.ceil(deadline) + LEAD if deadline else LEAD_WITHOUT_DEADLINE
        if lead <= deadline:
            raise ConfigError(
                [
                    Problem(
                        "launch.signal_lead",
                        f"{lead} s leave no time for a save of run.save_deadline = {deadline:g} s",
                        "leave it out, or lower run.save_deadline",
                    )
                ]
            )
        return evolve(self, signal_lead=lead, tasks_per_node=tasks or self.gpus_per_node or 1)

    def problems(self) -> Iterator[Problem]:
        limit = seconds(self.time) if self.time is not None else None
        if self.time is not None and limit is None:
            yield Problem("time", f"{self.time!r} is no time of Slurm", "minutes, HH:MM:SS or D-HH:MM:SS")
        elif limit and self.signal_lead is not None and limit <= self.signal_lead:
            message = f"{self.time} ends before the signal, {self.signal_lead} s earlier, is due"
            yield Problem("time", message, "a longer time, or a lower run.save_deadline")
        for name in ("account", "partition", "qos", "mem", "output"):
            if (value := getattr(self, name)) is not None and ("\n" in value or not value.strip()):
                yield Problem(name, f"{value!r} is no word of one line")
        for name in ("setup", "sbatch", "srun"):
            for i, line in enumerate(getattr(self, name)):
                if "\n" in line:
                    yield Problem(f"{name}.{i}", "holds a line break", "one line an entry")
                elif name != "setup" and not line.startswith("-"):
                    yield Problem(f"{name}.{i}", f"{line!r} is no option", "an option begins with '-'")


def seconds(time: str) -> int | None:
    """A time limit as Slurm reads it; None for what is none, 0 for no limit.

    `90` and `90:30` are minutes (and seconds), `1:30:00` hours; `2-12`, `2-12:30` and `2-12:30:00` days.
    """
    if time.upper() in ("UNLIMITED", "INFINITE"):
        return 0
    found = TIME.fullmatch(time)
    if found is None:
        return None
    days, *parts = (int(part) if part is not None else None for part in found.groups())
    first, second, third = parts
    if days is not None:
        return 86400 * days + 3600 * (first or 0) + 60 * (second or 0) + (third or 0)
    if third is not None:
        return 3600 * (first or 0) + 60 * (second or 0) + third
    return 60 * (first or 0) + (second or 0)
