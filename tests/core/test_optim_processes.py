"""Optimizers over processes: layouts give the same update, and a new process goes on bit for bit."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

SHARDED = """
import sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from optimkit import built, OPTIONS
from forge_core.optim import guarded_step, optimizer_mode

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/store", rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))

def run(name, shard):
    def prepare(model):
        model.double()
        if shard:
            fully_shard(model, mesh=mesh)

    model, optimizer = built(name, OPTIONS[name], prepare=prepare)
    for update in range(6):
        generator = torch.Generator().manual_seed(update)
        symbols = torch.randint(11, (8,), generator=generator)
        torch.nn.functional.cross_entropy(model(symbols), (symbols * 3) % 11).backward()
        if update == 3:
            for p in model.parameters():
                p.grad.mul_(float("nan"))
        guarded_step(optimizer, torch.tensor(update != 3))
        optimizer.zero_grad()
    with optimizer_mode(optimizer, "eval"):
        state = model.state_dict()
        return {k: v.full_tensor() if isinstance(v, DTensor) else v.clone() for k, v in state.items()}

for name in OPTIONS:
    plain, sharded = run(name, False), run(name, True)
    for key, value in plain.items():
        say = lambda message: f"{name} {key}: {message}"
        torch.testing.assert_close(sharded[key], value, rtol=1e-9, atol=1e-10, msg=say)
dist.barrier()
dist.destroy_process_group()
print("equal")
"""

RESUME = """
import sys
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from optimkit import built, OPTIONS, give_gradients
from forge_core.optim import guarded_step, optimizer_mode
from forge_core.testing.optimizers import bits
import hashlib

role, folder = sys.argv[1], Path(sys.argv[2])

def updates(model, optimizer, numbers):
    for number in numbers:
        give_gradients(model.parameters(), number)
        guarded_step(optimizer, torch.tensor(True))

for name in OPTIONS:
    model, optimizer = built(name, OPTIONS[name])
    if role == "first":
        updates(model, optimizer, range(5))
    with optimizer_mode(optimizer, "eval"):
        tree = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        if role == "first":
            dcp.save(tree, checkpoint_id=folder / name)
        else:
            for tensor in tree["model"].values():
                tensor.fill_(7.0)
            dcp.load(tree, checkpoint_id=folder / name)
            set_optimizer_state_dict(model, optimizer, tree["optimizer"])
    updates(model, optimizer, range(5, 10))
    print(name, hashlib.sha256(repr(sorted(bits(model, optimizer).items())).encode()).hexdigest())
"""


def run_script(script: str, *arguments: list[object]) -> list[str]:
    """Run the script once for each list of arguments, all at the same time; what each printed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", script]
    with contextlib.ExitStack() as stack:
        processes = []
        for listed in arguments:
            process = subprocess.Popen(
                [*command, *map(str, listed)], env=environment, stdout=PIPE, stderr=PIPE, text=True
            )
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        outputs = [process.communicate(timeout=100) for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return [out for out, _ in outputs]


@pytest.mark.slow
def test_sharded_updates_equal_those_of_one_process(tmp_path: Path) -> None:
    printed = run_script(SHARDED, [0, tmp_path], [1, tmp_path])
    assert [out.strip() for out in printed] == ["equal", "equal"]


@pytest.mark.slow
def test_a_new_process_goes_on_bit_for_bit(tmp_path: Path) -> None:
    (straight,) = run_script(RESUME, ["first", tmp_path])
    (resumed,) = run_script(RESUME, ["second", tmp_path])
    assert len(straight.splitlines()) == 4
    assert resumed == straight
