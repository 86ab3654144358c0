"""`forge doctor`."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import attrs

from forge_core.commands.command import Command
from forge_core.commands.doctor_extras import plugin_extras
from forge_core.commands.loading import blocked_plugins
from forge_core.commands.plugins import describe
from forge_core.data.wording import counted
from forge_core.plugins import Plugins

OLDEST_TORCH = (2, 13)
LITTLE_SPACE = 2 * 1024**3
EXTRAS = {
    "tokenizers": "tokenizers",
    "parquet": "pyarrow",
    "hf": "datasets",
    "chat": "jinja2",
    "zstd": "zstandard",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
}
"""Extra of forge-core -> module that it brings."""


@attrs.frozen
class Finding:
    """One line: OK, WARN (works, with less) or MISS (Forge cannot train like this)."""

    tag: Literal["OK", "WARN", "MISS"]
    what: str
    text: str
    hint: str = ""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dir", default="runs", metavar="DIR", help="folder for runs to look at")
    parser.add_argument(
        "--nproc", type=int, default=1, metavar="N", help="let N processes meet on this machine, too"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace, flags: list[str]) -> int:
    found = [finding for look in LOOKS for finding in look()]
    found += disk(Path(arguments.dir))
    if arguments.nproc != 1:
        found += meeting(arguments.nproc)
    healthy = all(finding.tag != "MISS" for finding in found)
    if arguments.json:
        print(json.dumps({"healthy": healthy, "findings": [attrs.asdict(f) for f in found]}, indent=2))
    else:
        width = max(len(finding.what) for finding in found)
        for finding in found:
            print(f"{finding.tag:<4}  {finding.what:<{width}}  {finding.text}")
            if finding.hint:
                print(f"      {'':<{width}}  {finding.hint}")
    return 0 if healthy else 1


def python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    fine = sys.version_info >= (3, 11)
    yield Finding("OK" if fine else "MISS", "python", f"{version} at {sys.executable}")


def torch_and_devices() -> Iterator[Finding]:
    """torch, and what it can compute on. Imports torch, which takes a second or two."""
    try:
        import torch
    except Exception as error:
        yield Finding(
            "MISS", "torch", f"{type(error).__name__}: {error}", "install the torch build for this machine"
        )
        return
    numbers = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    old = numbers < OLDEST_TORCH
    wanted = ".".join(map(str, OLDEST_TORCH))
    yield Finding(
        "MISS" if old else "OK", "torch", torch.__version__, f"needs {wanted} or newer" if old else ""
    )
    yield from devices()
    yield from processes()


def devices() -> Iterator[Finding]:
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    crowded = threads > cores
    hint = f"set OMP_NUM_THREADS={cores}" if crowded else ""
    yield Finding(
        "WARN" if crowded else "OK", "cpu", f"{counted(cores, 'core')}, {counted(threads, 'thread')}", hint
    )
    if not torch.accelerator.is_available():
        yield Finding("OK", "accelerator", "none; runs use the CPU")
        return
    kind = torch.accelerator.current_accelerator()
    number = torch.accelerator.device_count()
    names = (
        [torch.cuda.get_device_name(i) for i in range(number)]
        if kind and kind.type == "cuda"
        else [str(kind)]
    )
    yield Finding("OK", "accelerator", f"{number} x {', '.join(dict.fromkeys(names))}")


def processes() -> Iterator[Finding]:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        yield Finding("WARN", "processes", "this torch has no torch.distributed; runs take one process")
        return
    backends = [name for name in ("gloo", "nccl") if getattr(dist, f"is_{name}_available")()]
    needs = "nccl" if torch.accelerator.is_available() and torch.cuda.is_available() else "gloo"
    tag: Literal["OK", "WARN"] = "OK" if needs in backends else "WARN"
    yield Finding(tag, "processes", f"backends {', '.join(backends) or 'none'}")


def plugins() -> Iterator[Finding]:
    rows = describe(Plugins(blocked=blocked_plugins()))
    if not rows:
        yield Finding("OK", "plugins", "none installed; the core trains dense text models")
    for row in rows:
        broken = row["state"] == "broken"
        label = f"{row['name']} ({row['package']} {row['version']}) {row['state']}"
        hint = f"{row['reason']}" if row["state"] != "works" else ""
        yield Finding("WARN" if broken else "OK", "plugin", label, hint)


def extras() -> Iterator[Finding]:
    """Packages that some options need; a missing one is no fault."""
    for extra, module in EXTRAS.items():
        if find_spec(module) is not None:
            yield Finding("OK", f"extra {extra}", _version(module))
        else:
            hint = f'to have it: {shlex_python()} -m pip install "{_requirement(extra)}"'
            yield Finding("OK", f"extra {extra}", "not installed", hint)
    for found in plugin_extras():
        if found.missing:
            wanted = " ".join(f'"{requirement}"' for requirement in found.missing)
            hint = f"to have it: {shlex_python()} -m pip install {wanted}"
            yield Finding("OK", f"extra {found.name}", "not installed", hint)
        else:
            yield Finding("OK", f"extra {found.name}", ", ".join(found.there))


def _version(module: str) -> str:
    for name in metadata.packages_distributions().get(module, [module]):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "installed"


def _requirement(extra: str) -> str:
    """What the extra stands for. The bare name of forge-core is somebody else's on the public index."""
    for line in metadata.requires("forge-core") or []:
        requirement, _, marker = line.partition(";")
        if extra in marker.replace("'", '"').split('"'):
            return requirement.strip()
    return extra


def shlex_python() -> str:
    """The running interpreter, as one would type it."""
    import shlex

    return shlex.quote(sys.executable)


def terminal() -> Iterator[Finding]:
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        yield Finding(
            "OK", "terminal", f"{os.environ.get('TERM', 'unknown')}, {columns} columns: progress bar"
        )
    else:
        yield Finding("OK", "terminal", "output is not a terminal: progress in plain lines")


def disk(folder: Path) -> Iterator[Finding]:
    """Room and permission where runs go: the folder, or the nearest that exists above it."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        yield Finding("MISS", "run folder", f"{place} is not a folder", "choose another run.dir")
    elif not os.access(place, os.W_OK | os.X_OK):
        yield Finding("MISS", "run folder", f"{place} cannot be written", "choose another run.dir")
    else:
        free = shutil.disk_usage(place).free
        tag: Literal["OK", "WARN"] = "OK" if free > LITTLE_SPACE else "WARN"
        yield Finding(tag, "run folder", f"{free / 1024**3:,.1f} GiB free for {folder}")


def meeting(nproc: int) -> Iterator[Finding]:
    """Whether processes of this machine can start, meet and add up a number."""
    from forge_core.launch.local import check_nproc, run_local

    check_nproc(nproc)
    begin = time.monotonic()
    status = run_local([sys.executable, "-m", "forge_core.launch.hello"], nproc, deadline=10.0)
    seconds = f"{time.monotonic() - begin:.0f} s"
    if status == 0:
        yield Finding("OK", "meeting", f"{nproc} processes met over gloo and added up, {seconds}")
    else:
        hint = "see the error above; GLOO_SOCKET_IFNAME=lo picks the network"
        yield Finding("MISS", "meeting", f"{nproc} processes failed with status {status}, {seconds}", hint)


LOOKS: tuple[Callable[[], Iterator[Finding]], ...] = (python, torch_and_devices, plugins, extras, terminal)

COMMAND = Command(
    description="Look at this machine and the installed packages: OK, WARN (works, with less) or MISS\n"
    "(cannot train like this). Exit status 1 if anything is MISS.",
    examples="examples:\n  forge doctor\n  forge doctor --nproc 2\n  forge doctor --dir /scratch/runs --json",
    run=run,
    arguments=arguments,
)
