"""A run as a job of Slurm: a batch script that starts one task a rank with srun, and queues itself again."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from forge_core.config.tables import LaunchConfig
from forge_core.errors import ForgeError
from forge_core.launch.environment import PLACE
from forge_core.launch.status import REQUEUE, STATUS_FILE

SUBMIT_TIMEOUT = 120.0


def batch_script(
    launch: LaunchConfig, command: Sequence[str], *, name: str, folder: str, run_dir: str
) -> str:
    """The text of a job's script.

    Args:
        launch: what the job asks for, resolved.
        command: what each rank runs, word by word.
        name: of the run and of the job.
        folder: where the run is started from.
        run_dir: holds run folders, seen by every node; absolute or relative to `folder`.
    """
    parts = [
        "#!/bin/bash",
        *(f"#SBATCH {option}" for option in _options(launch, name)),
        "",
        f"cd -- {shlex.quote(folder)} || exit 1",
        f"unset {' '.join(PLACE)}  # it may have been submitted from a job",
        'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}"',
        "export OMP_WAIT_POLICY=PASSIVE PYTHONUNBUFFERED=1 TORCH_CPP_LOG_LEVEL=ERROR",
        *_setup(launch.setup),
        "",
        *_run(launch, command, name, run_dir),
    ]
    return "\n".join(parts) + "\n"


def _options(launch: LaunchConfig, name: str) -> Iterator[str]:
    """What sbatch reads. Without `B:` the signal goes to the ranks, and not to this script."""
    values = {
        "job-name": name,
        "account": launch.account,
        "partition": launch.partition,
        "qos": launch.qos,
        "nodes": launch.nodes,
        "ntasks-per-node": launch.tasks_per_node,
        "gpus-per-node": launch.gpus_per_node or None,
        "cpus-per-task": launch.cpus_per_task,
        "mem": launch.mem,
        "time": launch.time,
        "signal": f"USR1@{launch.signal_lead}",
        "output": launch.output,
        "open-mode": "append",
    }
    for option, value in values.items():
        if value is not None:
            yield shlex.quote(f"--{option}={value}")
    yield "--requeue" if launch.requeue else "--no-requeue"
    yield from launch.sbatch


def _setup(lines: Sequence[str]) -> list[str]:
    return ["", "set -e", *lines, "set +e"] if lines else []


def _run(launch: LaunchConfig, command: Sequence[str], name: str, run_dir: str) -> Iterator[str]:
    """The ranks, their status, and the queue again.

    srun ends all ranks as soon as one fails, and its own status is the highest of all, also of those that it
    ended. The ranks leave the run's status in a file (`forge_core.launch.status`).
    """
    options = ["--kill-on-bad-exit=1", "--label"]
    if launch.cpus_per_task is not None:
        options.append(f"--cpus-per-task={launch.cpus_per_task}")  # srun does not take it from sbatch
    place = shlex.quote(run_dir)
    yield f"mkdir -p -- {place} || exit 1"
    yield f'export {STATUS_FILE}={place}/{shlex.quote(f".{name}")}."$SLURM_JOB_ID"'
    yield f'rm -f -- "${STATUS_FILE}"'
    yield shlex.join(["srun", *options, *launch.srun, *command])
    yield "status=$?"
    yield f'if [ -s "${STATUS_FILE}" ]; then status=$(cat -- "${STATUS_FILE}"); fi'
    yield f'rm -f -- "${STATUS_FILE}"'
    if launch.requeue:
        yield f'if [ "$status" -eq {REQUEUE} ]; then'
        yield '    scontrol requeue "$SLURM_JOB_ID" || echo "error: the job cannot be queued again" >&2'
        yield "fi"
    yield 'exit "$status"'


def submit(script: str) -> str:
    """Hand a script to sbatch; the number of the job.

    Raises:
        ForgeError: there is no sbatch here, or it refuses; with what it says.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise ForgeError(
            "there is no sbatch on this machine",
            "leave --submit out to print the script, and submit it where there is one",
        )
    try:
        done = subprocess.run(
            [sbatch, "--parsable"], input=script, capture_output=True, text=True, timeout=SUBMIT_TIMEOUT
        )
    except subprocess.TimeoutExpired as error:
        raise ForgeError(f"sbatch did not answer within {SUBMIT_TIMEOUT:g} s") from error
    if done.returncode != 0:
        raise ForgeError(f"sbatch refuses the job: {' '.join(done.stderr.split()) or done.returncode}")
    return done.stdout.strip().partition(";")[0]
