"""A batch system in three small programs: sbatch, srun and scontrol, as `forge launch slurm` uses them.

sbatch runs the script of a job at once, with the variables that its #SBATCH lines lead to, and again after a
requeue. srun starts the tasks, passes SIGUSR1 on to them (as the daemons do for `--signal` without `B:`),
ends all at the first bad status if asked to, and ends with the highest. scontrol notes what it is asked for.
"""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

SRUN = """
import os, signal, subprocess, sys, time
words = sys.argv[1:]
options = []
while words[0].startswith("-"):
    options.append(words.pop(0))
tasks = int(os.environ["SLURM_NTASKS"])
nodes = int(os.environ["SLURM_JOB_NUM_NODES"])
log = os.environ["FAKE_LOG"]
open(log, "a").write(f"srun {' '.join(options)}\\n")
running = []
signal.signal(signal.SIGUSR1, lambda number, frame: [task.send_signal(number) for task in running])
for rank in range(tasks):
    place = {"PROCID": rank, "LOCALID": rank % (tasks // nodes), "NODEID": rank // (tasks // nodes),
             "STEP_ID": 0, "STEP_NUM_TASKS": tasks, "STEP_NODELIST": os.environ["SLURM_JOB_NODELIST"],
             "STEP_TASKS_PER_NODE": f"{tasks // nodes}(x{nodes})"}
    variables = {f"SLURM_{name}": str(value) for name, value in place.items()}
    running.append(subprocess.Popen(words, env={**os.environ, **variables}))
open(os.environ["FAKE_LOG"] + ".srun", "w").write(str(os.getpid()))
left = list(running)
killed = False
while left:
    time.sleep(0.02)
    for task in [task for task in left if task.poll() is not None]:
        left.remove(task)
        if task.returncode and "--kill-on-bad-exit=1" in options and not killed:
            killed = True
            for other in left:
                other.kill()
sys.exit(max(code if code >= 0 else 128 - code for code in (task.returncode for task in running)))
"""
SBATCH = """
import os, shlex, subprocess, sys
script = sys.stdin.read()
log = os.environ["FAKE_LOG"]
given = dict(pair for line in script.splitlines() if line.startswith("#SBATCH")
             for word in shlex.split(line)[1:] if word.startswith("--")
             for pair in [tuple(word[2:].partition("=")[::2])])
open(log, "a").write(f"sbatch {' '.join(sys.argv[1:])} {given}\\n")
if given.get("partition") == "absent":
    sys.exit("sbatch: error: invalid partition specified: absent")
nodes, each = int(given["nodes"]), int(given["ntasks-per-node"])
variables = {"JOB_ID": 4711, "NTASKS": nodes * each, "JOB_NUM_NODES": nodes, "JOB_NODELIST": "localhost",
             "CPUS_PER_TASK": given.get("cpus-per-task", 1)}
environment = {**os.environ, **{f"SLURM_{name}": str(value) for name, value in variables.items()}}
print("4711;cluster", flush=True)
for count in range(1 + int(os.environ.get("FAKE_REQUEUES", "0"))):
    environment["SLURM_RESTART_COUNT"] = str(count)
    with open(os.environ["FAKE_LOG"] + ".out", given["open-mode"][0]) as output:
        done = subprocess.run(["bash", "-c", script], env=environment, stdout=output, stderr=output)
    open(log, "a").write(f"job ended with {done.returncode}\\n")
    if not os.path.exists(log + ".requeue"):
        break
    os.remove(log + ".requeue")
"""
SCONTROL = """
import os, sys
open(os.environ["FAKE_LOG"], "a").write(f"scontrol {' '.join(sys.argv[1:])}\\n")
open(os.environ["FAKE_LOG"] + ".requeue", "w").close()
"""


class FakeSlurm:
    """The programs in `folder`/bin, and what they noted.

    Attributes:
        variables: the environment of a process that shall find them.
    """

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        for name, text in {"srun": SRUN, "sbatch": SBATCH, "scontrol": SCONTROL}.items():
            path = programs / name
            path.write_text(f"#!{sys.executable}\n{text}")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        path = f"{programs}{os.pathsep}{variables['PATH']}"
        self.variables = {**variables, "PATH": path, "FAKE_LOG": str(folder / "log")}

    @property
    def log(self) -> list[str]:
        return (self.folder / "log").read_text().splitlines()

    @property
    def output(self) -> str:
        return (self.folder / "log.out").read_text()

    @property
    def srun(self) -> Path:
        """The file that holds srun's process id once all tasks have been started."""
        return self.folder / "log.srun"
