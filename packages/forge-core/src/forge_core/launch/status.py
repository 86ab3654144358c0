"""The exit status of a run, and how it comes through srun, which has one of its own."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

STATUS_FILE = "FORGE_STATUS_FILE"
"""Variable of a job that `forge launch slurm` made: the file that takes the status of the run."""
REQUEUE = 75
"""Stopped by a signal, with a checkpoint saved to go on from."""
ORDERLY = frozenset({REQUEUE, *(128 + n for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))})
"""Statuses of a rank that a signal stopped after a finished step, as all others stop: no failure."""


def settle(status: int, *, main: bool) -> int:
    """The status for this process to end with, given that of the run. `main`: this is rank 0.

    srun ends the other ranks as soon as one has another status than 0, and after a signal they may still be
    saving: in a job of `forge launch slurm` such a rank ends with 0, and rank 0 leaves the run's status in a
    file.
    """
    if STATUS_FILE not in os.environ or status not in ORDERLY:
        return status
    return 0 if not main or keep(status) else status


def keep(status: int) -> bool:
    """Leave the run's status in the file of the job, where there is one. False if it cannot be written.

    srun's own status is the highest of all ranks, also of those that it killed. Here the first failure
    counts, and more than a stop.
    """
    path = os.environ.get(STATUS_FILE)
    if not path:
        return False
    file = Path(path)
    with suppress(OSError, ValueError):
        kept = int(file.read_text(encoding="ascii"))
        if kept not in ORDERLY or status in ORDERLY:
            return True
    try:
        file.write_text(f"{status}\n", encoding="ascii")
    except OSError:
        return False
    return True
