"""Set up and run sessions of noxfile.py, needing nothing but Python 3.11 or newer.

    python3 bootstrap.py                      list the sessions
    python3 bootstrap.py quickstart           train a small language model
    python3 bootstrap.py tests lint           run sessions one after the other
    python3 bootstrap.py tests -- -k guard    what follows `--` goes to the session

It makes `.venv` with nox in it, in the versions of constraints.txt, and hands over to nox, which makes every
other environment. Older interpreters must get far enough to be told, so it uses little syntax, no packages.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

OLDEST = (3, 11)
ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
# With hatchling and editables beside it, pip installs packages of the checkout without build environments.
TOOLS = ["nox", "hatchling", "editables"]


def main(arguments: list[str]) -> int:
    """Hand `arguments` (sessions, then options for them after `--`) to nox; returns its exit status."""
    if sys.version_info < OLDEST:
        wanted = ".".join(map(str, OLDEST))
        print(f"Forge needs Python {wanted} or newer; this is {sys.version.split()[0]}.", file=sys.stderr)
        print(f"If you have one, name it: python{wanted} bootstrap.py {' '.join(arguments)}", file=sys.stderr)
        return 2
    split = arguments.index("--") if "--" in arguments else len(arguments)
    sessions, rest = arguments[:split], arguments[split:]
    command = [str(tool_environment()), "-m", "nox", "--noxfile", str(ROOT / "noxfile.py")]
    command += ["--session", *sessions, *rest] if sessions else ["--list"]
    return subprocess.call(command)


def tool_environment() -> Path:
    """Make `.venv`, or bring it up to date; returns its interpreter. An up-to-date one costs nothing."""
    python = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    constraints = ROOT / "constraints.txt"
    stamp = VENV / "bootstrap.stamp"
    contents = constraints.read_bytes() + " ".join([*TOOLS, sys.version]).encode()
    wanted = hashlib.sha256(contents).hexdigest()
    if python.exists() and stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"bootstrap: setting up {VENV}", flush=True)
    subprocess.check_call([sys.executable, "-m", "venv", str(VENV)])
    install = [str(python), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    subprocess.check_call([*install, "--constraint", str(constraints), *TOOLS])
    stamp.write_text(wanted)
    return python


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
    except subprocess.CalledProcessError as error:
        print(f"bootstrap: this failed: {' '.join(error.cmd)}", file=sys.stderr)
        print(
            "The lines above say why. On Debian and Ubuntu, venv needs the package python3-venv.",
            file=sys.stderr,
        )
        sys.exit(1)
