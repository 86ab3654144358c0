"""One process of a `WorkerPool`: takes jobs from a pipe, runs them, sends back plain data.

Nothing here imports torch before the number of threads is set.
"""

from __future__ import annotations

import datetime
import faulthandler
import importlib
import importlib.util
import io
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any, TextIO

PLAIN = (bool, int, float, str, bytes, type(None))


def main(rank: int, size: int, folder: str, connection: Connection) -> None:
    """Serve jobs until the pipe closes or the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business; it closes the pipe
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", MASTER_ADDR="127.0.0.1")
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # a host name that does not resolve must not matter
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import torch

    torch.set_num_threads(1)
    connection.send_bytes(pack("ready"))
    with (Path(folder) / f"stacks{rank}.txt").open("w") as stacks:
        while True:
            try:
                job = unpack(connection.recv_bytes())
            except EOFError:
                break
            if job is None:
                break
            connection.send_bytes(pack(_run(job, rank, size, stacks)))
    _leave_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter's own end takes seconds with gloo's threads about


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _run(job: dict[str, Any], rank: int, size: int, stacks: TextIO) -> dict[str, Any]:
    """Run one job: {"value": ...}, or {"type", "message", "traceback"} of what it raised."""
    import torch

    os.chdir(job["cwd"])
    sys.path[:] = job["path"]
    os.environ["MASTER_PORT"] = str(job["port"])
    stacks.seek(0)
    stacks.truncate()
    faulthandler.dump_traceback_later(job["timeout"], file=stacks)
    try:
        torch.manual_seed(0)
        _enter_group(job, rank, size)
        function = find(job["module"], job["file"], job["name"])
        answer = {"value": plain(function(*job["arguments"]))}
    except BaseException as error:
        answer = {"type": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
    finally:
        faulthandler.cancel_dump_traceback_later()
    if job["group"] != "shared" or "value" not in answer:
        _leave_group()
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    return answer


def _enter_group(job: dict[str, Any], rank: int, size: int) -> None:
    import torch.distributed as dist

    if job["group"] != "shared" or job["reset"]:
        _leave_group()
    if job["group"] == "none" or dist.is_initialized():
        return
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job['store']}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=job["timeout"]),
    )


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def find(module: str, file: str, name: str) -> Callable[..., Any]:
    """A function by the module, file and qualified name it has in the parent.

    A test module may have a name under which it cannot be imported; then it is loaded from its file.
    """
    value: Any = _module(module, file)
    for part in name.split("."):
        value = getattr(value, part)
    function: Callable[..., Any] = value
    return function


def _module(name: str, file: str) -> ModuleType:
    loaded = sys.modules.get(name)
    if loaded is None and name != "__main__":
        try:
            loaded = importlib.import_module(name)
        except ImportError:
            loaded = None
    if loaded is not None and os.path.realpath(loaded.__file__ or "") == os.path.realpath(file):
        return loaded
    name = "__forge_worker_main__" if name == "__main__" else name
    if name == "__forge_worker_main__" and name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def plain(value: Any) -> Any:
    """`value` with tensors detached and paths as strings.

    Raises:
        TypeError: something that is neither a tensor, a number, a string, None nor a list, tuple or dict
            of these. Build what is more than data inside the function.
    """
    import torch

    if isinstance(value, PLAIN):
        return value
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return value.detach()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, list | tuple):
        items = [plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    raise TypeError(f"a {type(value).__name__} cannot travel between processes; plain data and tensors can")


def pack(value: Any) -> bytes:
    """Bytes of plain data."""
    import torch

    buffer = io.BytesIO()
    torch.save(plain(value), buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """The inverse of `pack`; only plain data is read, nothing is executed."""
    import torch

    return torch.load(io.BytesIO(data), weights_only=True)
