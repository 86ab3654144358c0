"""Ranks on this machine: their surroundings, their ends, and what becomes of the others."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launchkit import LAUNCHER, clean_environment, end_all, finish, gone, kill, launch, pids, script, within

from forge_core.errors import UsageError
from forge_core.launch.local import check_nproc, forge_command
from forge_core.launch.ports import ReservedPort
from forge_core.launch.processes import Lines
from forge_core.launch.supervise import GRACE

SLEEP = "ready()\ntime.sleep(60)"
HANGS = "on_signal(lambda number: None)\nready()\nwhile True: time.sleep(60)"
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    yield
    end_all()


def test_each_rank_has_its_place(tmp_path: Path) -> None:
    show = f"print(*(os.environ[name] for name in {VARIABLES}), 'TORCHELASTIC_RUN_ID' in os.environ)"
    status, out, err = finish(launch(script(tmp_path, show), 3, TORCHELASTIC_RUN_ID="other"))
    assert (status, err) == (0, "")
    port = out.splitlines()[0].split()[-2]
    expected = {f"{rank} {rank} 3 3 127.0.0.1 {port} False" for rank in range(3)}
    assert {re.sub(r"^\[rank \d] ", "", line) for line in out.splitlines()} == expected
    assert sum(line.startswith("[rank 1] 1 1 ") for line in out.splitlines()) == 1
    assert sum(line.startswith("0 0 ") for line in out.splitlines()) == 1


def test_cores_are_shared_unless_the_user_says_how(tmp_path: Path) -> None:
    path = script(tmp_path, "print(os.environ['OMP_NUM_THREADS'], os.environ['OMP_WAIT_POLICY'])")
    cores = len(os.sched_getaffinity(0))
    _, out, _ = finish(launch(path, 2))
    assert f"{max(1, cores // 2)} PASSIVE" in out.splitlines()
    _, out, _ = finish(launch(path, 2, OMP_NUM_THREADS="7", OMP_WAIT_POLICY="ACTIVE"))
    assert "7 ACTIVE" in out.splitlines()


def test_other_ranks_output_comes_in_whole_lines_on_its_own_stream(tmp_path: Path) -> None:
    action = (
        "sys.stdout.write('one'); sys.stdout.flush(); time.sleep(0.2); sys.stdout.write(' two\\nlast')\n"
        "sys.stderr.write('warned\\n')"
    )
    status, out, err = finish(launch(script(tmp_path, "pass", action)))
    assert status == 0
    assert out.splitlines() == ["[rank 1] one two", "[rank 1] last"]
    assert err == "[rank 1] warned\n"


def test_output_without_a_reader_ends_nothing(tmp_path: Path) -> None:
    path = script(tmp_path, "time.sleep(0.5)", "for i in range(20000): print('x' * 50)")
    process = launch(path)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=20) == 0
    assert process.stderr is not None
    process.stderr.close()


def test_rank_zero_has_the_terminal(tmp_path: Path) -> None:
    path = script(tmp_path, "print('terminal', sys.stdout.isatty(), sys.stderr.isatty())")
    main, side = pty.openpty()
    command = [sys.executable, "-c", LAUNCHER, "2", "20", "0", str(path)]
    process = subprocess.Popen(
        command, stdin=side, stdout=side, stderr=side, env=clean_environment(), start_new_session=True
    )
    os.close(side)
    seen = b""
    while b"rank 1" not in seen or b"True" not in seen:
        seen += os.read(main, 4096)
    assert process.wait(timeout=20) == 0
    os.close(main)
    assert b"terminal True True" in seen
    assert b"[rank 1] terminal False False" in seen


@pytest.mark.parametrize("status", [2, 3, 75, 143, 1])
def test_the_status_of_the_ranks_is_that_of_the_run(tmp_path: Path, status: int) -> None:
    assert finish(launch(script(tmp_path, f"sys.exit({status})")))[0] == status


def test_the_cause_is_named_and_not_its_consequences(tmp_path: Path) -> None:
    """Rank 0 notices that rank 1 is on its way out, and is the first to end."""
    wait = "while not os.path.exists(f'{__file__}.1.pid'): time.sleep(0.01)"
    victim = wait + "\nfail(RuntimeError('[gloo/tcp/pair.cc] Connection closed by peer'))"
    cause = "error = ValueError('boom')\nready()\ntime.sleep(0.5)\nfail(error, 3)"
    status, _, err = finish(launch(script(tmp_path, victim, cause)))
    assert status == 3
    assert err.splitlines()[0] == "error: rank 1: ValueError: boom"
    assert err.splitlines()[1].startswith("  then rank 0: RuntimeError: [gloo")


def test_what_all_ranks_say_is_said_once(tmp_path: Path) -> None:
    status, _, err = finish(launch(script(tmp_path, "fail(ValueError('no data'), 2)"), 3))
    assert status == 2
    assert err.splitlines() == ["error: ValueError: no data", "  on every rank"]


def test_ranks_that_hang_are_killed_soon_after_one_failed(tmp_path: Path) -> None:
    hangs = "import subprocess\nprint('child', subprocess.Popen(['sleep', '60']).pid, flush=True)\n" + HANGS
    process = launch(script(tmp_path, hangs, "time.sleep(0.5)\nsys.exit(7)"))
    began = time.monotonic()
    status, out, err = finish(process)
    assert status == 7
    assert 1.5 <= time.monotonic() - began < 5
    assert GRACE == 5
    assert "error: rank 1: ended with status 7" in err
    assert "killed, as they did not end: rank 0" in err
    child = int(out.split("child ")[1].split()[0])
    assert gone([child])


def test_a_rank_that_cannot_end_after_its_error_is_ended(tmp_path: Path) -> None:
    stuck = "tell(ValueError('boom'), 1, 'ValueError: boom')\ntime.sleep(60)"
    began = time.monotonic()
    status, _, err = finish(launch(script(tmp_path, SLEEP, stuck)))
    assert status == 1
    assert "rank 1: ValueError: boom" in err
    assert time.monotonic() - began < 8


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_in_the_middle_is_named(tmp_path: Path, rank: int) -> None:
    """The other one reports an error that may look like a cause before the launcher sees the killed one."""
    process = launch(script(tmp_path, SLEEP))
    ranks = pids(process, tmp_path)
    os.kill(ranks[rank], signal.SIGKILL)
    status, _, err = finish(process)
    assert status == 128 + signal.SIGKILL
    assert f"error: rank {rank}: killed by SIGKILL" in err
    assert gone(ranks)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_signals_are_passed_on_once_and_waited_for(tmp_path: Path, number: signal.Signals) -> None:
    saves = (
        "def save(number):\n    time.sleep(1)\n    print('saved', got, flush=True)\n    sys.exit(75)\n"
        "on_signal(save)\nready()\nwhile True: time.sleep(60)"
    )
    process = launch(script(tmp_path, saves))
    pids(process, tmp_path)
    process.send_signal(number)
    status, out, err = finish(process)
    assert (status, err) == (75, "")
    assert sorted(out.splitlines()) == [f"[rank 1] saved [{int(number)}]", f"saved [{int(number)}]"]


def test_a_rank_that_saves_for_longer_is_not_killed_as_one_that_hangs(tmp_path: Path) -> None:
    """Rank 1 stops at once, rank 0 takes longer than others get after a failure."""
    action = "on_signal(lambda number: (time.sleep(0 if rank else 2.5), os._exit(75)))\n" + SLEEP
    process = launch(script(tmp_path, action))
    pids(process, tmp_path)
    process.terminate()
    status, _, err = finish(process)
    assert (status, err) == (75, "")


def test_ranks_that_do_not_stop_in_time_are_killed(tmp_path: Path) -> None:
    process = launch(script(tmp_path, HANGS), deadline=0.5)
    ranks = pids(process, tmp_path)
    began = time.monotonic()
    process.terminate()
    status, _, err = finish(process)
    assert status == 128 + signal.SIGTERM
    assert "ranks 0 and 1" in err
    assert 1 < time.monotonic() - began < 5
    assert gone(ranks)


def test_a_signal_to_one_rank_alone_waits_for_the_others_to_stop(tmp_path: Path) -> None:
    """Ranks tell each other; the launcher hears of it by the first that ends."""
    one = "on_signal(lambda number: os._exit(143))\nready()\ntime.sleep(60)"
    process = launch(script(tmp_path, "ready()\ntime.sleep(2.5)\nsys.exit(143)", one))
    os.kill(pids(process, tmp_path)[1], signal.SIGTERM)
    status, _, err = finish(process)
    assert (status, err) == (143, "")


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    process = launch(script(tmp_path, HANGS), deadline=60)
    ranks = pids(process, tmp_path)
    process.terminate()
    time.sleep(0.3)
    began = time.monotonic()
    process.terminate()
    status, _, _ = finish(process)
    assert status == 128 + signal.SIGTERM
    assert time.monotonic() - began < 3
    assert gone(ranks)


def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    process = launch(script(tmp_path, HANGS))
    ranks = pids(process, tmp_path)
    kill(process)
    assert gone(ranks)
    finish(process)


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    path = script(tmp_path, "print('started')")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, out, err = finish(launch(path, port=taken.getsockname()[1]))
    assert (status, out) == (2, "")
    assert re.match(r"error: port \d+ cannot be used: Address already in use\n  hint: ", err)
    assert len(err.splitlines()) == 2
    status, out, err = finish(launch(path, port=70000))
    assert (status, out) == (2, "")
    assert "port 70000 cannot be used" in err


def test_the_port_is_kept_until_rank_zero_listens_on_it() -> None:
    with ReservedPort() as reserved:
        others = []
        for _ in range(300):
            other = socket.socket()
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", 0))
            assert other.getsockname()[1] != reserved.number
            others.append(other)
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("", reserved.number))
            listener.listen()
        for other in others:
            other.close()


@pytest.mark.parametrize(("nproc", "world"), [(0, "1"), (-1, "1"), (5000, "1"), (2, "4")])
def test_numbers_that_are_refused(monkeypatch: pytest.MonkeyPatch, nproc: int, world: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(UsageError, match=f"--nproc {nproc}"):
        check_nproc(nproc)


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    process = launch(tmp_path / "absent.py")
    status, _, err = finish(process)
    assert status == 2  # Python's own status for it
    assert "error: ended with status 2\n  on every rank" in err


def test_lines_are_cut_where_they_never_end(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as target:
        lines = Lines(3, target.fileno())
        lines.feed(b"x" * 100_000)
        lines.feed(b"y\n")
        lines.feed(b"")
    written = (tmp_path / "out").read_bytes()
    assert written == b"[rank 3] " + b"x" * 100_000 + b"\n[rank 3] y\n"


def test_ranks_look_for_modules_where_this_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`python -m forge_core` finds modules in the current folder, the command `forge` does not."""
    monkeypatch.chdir(tmp_path)
    assert "-P" in forge_command("train")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "-P" not in forge_command("train")
    assert forge_command("train", "a b")[-4:] == ["-m", "forge_core", "train", "a b"]


def test_a_faulty_configuration_is_told_once_and_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom forge_core.commands.main import main\n"
        "status = main(['train', 'quickstart', '--nproc', '2', '--optimizer.lrr=1'])\n"
        "assert not any(name in sys.modules for name in ('torch', 'numpy'))\nsys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=20
    )
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("optimizer.lrr") == done.stderr.count("error:") + 1 == 2
    assert list(tmp_path.iterdir()) == []


def test_a_launch_waits_for_no_grandchild(tmp_path: Path) -> None:
    """A program that a rank left behind holds its pipes; the run is over all the same."""
    action = "import subprocess\nprint(subprocess.Popen(['sleep', '20']).pid, flush=True)"
    began = time.monotonic()
    process = launch(script(tmp_path, "pass", action))
    assert process.stdout is not None
    child = int(process.stdout.readline().split()[-1])
    assert within(10, lambda: process.poll() is not None)
    assert process.returncode == 0
    assert time.monotonic() - began < 10
    os.kill(child, signal.SIGKILL)
    finish(process)
