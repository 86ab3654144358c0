"""What goes wrong on one rank ends all of them soon, and says on which rank it began and what it was."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from launchkit import clean_environment
from torch.distributed import HashStore, TCPStore

from forge_core.config.tables import DistributedConfig
from forge_core.distributed import process_group
from forge_core.distributed.environment import Environment, read_environment
from forge_core.distributed.lifelines import Lifelines, Line
from forge_core.distributed.process_group import join
from forge_core.errors import ForgeError

CPU = torch.device("cpu")


@attrs.frozen
class Ended:
    """A rank that has ended: exit status, standard error, and when, in seconds."""

    status: int
    text: str
    time: float


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def launch(action: str, folder: Path, *flags: str) -> tuple[list[Ended], float]:
    """Run two ranks to their end: how each ended, and the seconds it took."""
    environment = clean_environment() | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    code = "import sys, distributedkit; distributedkit.launched(*sys.argv[1:])"
    command = [sys.executable, "-c", code, action, str(folder), *flags]
    begin = time.monotonic()
    processes = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        with ThreadPoolExecutor() as pool:
            return list(pool.map(ended, processes)), time.monotonic() - begin
    finally:
        for process in processes:
            process.kill()


def ended(process: subprocess.Popen[str]) -> Ended:
    """Wait for a rank, two minutes at most."""
    try:
        text = process.communicate(timeout=120)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        text = process.communicate()[1]
    return Ended(process.returncode, text, time.monotonic())


def exit_record(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run" / "exit.json").read_text())
    return found


@pytest.mark.slow
def test_an_exception_on_one_rank_ends_all_and_is_named(tmp_path: Path) -> None:
    ranks, _ = launch("boom", tmp_path, "--distributed.timeout=120", "--distributed.start_timeout=120")
    assert abs(ranks[0].time - ranks[1].time) < 20
    assert [r.status for r in ranks] == [1, 1]
    assert "error: rank 1: ValueError: boom" in ranks[1].text
    assert "rank 1 failed after step 1: ValueError: boom" in ranks[0].text
    assert exit_record(tmp_path) == {"status": 1, "reason": "ValueError: boom", "step": 1, "rank": 1}


@pytest.mark.slow
def test_a_rank_that_does_not_arrive_is_named_with_its_step(tmp_path: Path) -> None:
    ranks, _ = launch("hang", tmp_path, "--distributed.timeout=3")
    assert abs(ranks[0].time - ranks[1].time) < 20
    assert [r.status for r in ranks] == [1, 1]
    assert "a collective of step 3 timed out: rank 1 (after step 2) did not arrive" in ranks[0].text
    assert "rank 0 failed after step 2" in ranks[1].text
    assert exit_record(tmp_path)["rank"] == 0


@pytest.mark.slow
def test_a_rank_that_dies_without_a_word_is_named(tmp_path: Path) -> None:
    ranks, _ = launch("die", tmp_path)
    assert abs(ranks[0].time - ranks[1].time) < 20
    assert [r.status for r in ranks] == [1, -9]
    # what others know of its step is up to half a second old
    assert re.search(r"rank 1 failed after step [01]: its process has ended without a word", ranks[0].text)
    assert exit_record(tmp_path)["rank"] == 1


@pytest.mark.slow
def test_a_rank_that_dies_is_noticed_by_one_that_waits_for_nothing(tmp_path: Path) -> None:
    ranks, _ = launch("die_unnoticed", tmp_path)
    assert abs(ranks[0].time - ranks[1].time) < 20, "it would have slept a minute"
    assert [r.status for r in ranks] == [1, -9]
    assert re.search(r"rank 1 failed after step [01]: its process has ended without a word", ranks[0].text)
    assert exit_record(tmp_path)["rank"] == 1


@pytest.mark.slow
def test_a_rank_that_dies_while_groups_are_made_is_noticed(tmp_path: Path) -> None:
    ranks, _ = launch("die_at_the_meeting", tmp_path, "--distributed.start_timeout=110")
    assert abs(ranks[0].time - ranks[1].time) < 20
    assert [r.status for r in ranks] == [1, -9]
    assert "rank 1 failed after step 0: its process has ended without a word" in ranks[0].text


@pytest.mark.slow
def test_ranks_that_a_launcher_started_meet_train_and_part(tmp_path: Path) -> None:
    ranks, _ = launch("nothing", tmp_path)
    assert [r.status for r in ranks] == [0, 0], ranks
    assert ranks[1].text == ""  # one rank speaks
    assert exit_record(tmp_path) == {"status": 0, "reason": "done after 4 steps", "step": 4}


@pytest.mark.slow
def test_the_first_step_may_take_longer_than_later_ones(tmp_path: Path) -> None:
    """Rank 1 takes 6 s for its first step, three times of what others wait for it from the second step on."""
    ranks, seconds = launch("slow_start", tmp_path, "--distributed.timeout=2")
    assert [r.status for r in ranks] == [0, 0], ranks
    assert seconds > 6
    assert exit_record(tmp_path)["step"] == 4


@pytest.mark.slow
def test_data_that_ends_on_one_rank_ends_all_after_the_same_update(tmp_path: Path) -> None:
    """Five batches on rank 0, three on rank 1, ten updates wanted: three are made, and it is no success."""
    ranks, _ = launch("ending", tmp_path)
    assert abs(ranks[0].time - ranks[1].time) < 20
    assert [r.status for r in ranks] == [2, 2]
    assert "error: rank 1: the data ends after 3 batches" in ranks[1].text
    assert "rank 1 failed after step 3: the data ends after 3 batches" in ranks[0].text
    record = {"status": 2, "reason": "the data ends after 3 batches", "hint": "give more"}
    assert exit_record(tmp_path) == {**record, "step": 3, "rank": 1}


@pytest.mark.slow
def test_a_token_beyond_the_vocabulary_in_the_middle_of_the_data_ends_all(tmp_path: Path) -> None:
    flags = ("--data.source=kit/beyond", "--train.max_steps=30")
    ranks, _ = launch("nothing", tmp_path, *flags)
    assert abs(ranks[0].time - ranks[1].time) < 20
    assert [r.status for r in ranks] == [2, 2]
    message = "token id 99 does not fit model.vocab_size = 40"
    record = exit_record(tmp_path)
    reader, other = ranks[record["rank"]], ranks[1 - record["rank"]]
    assert message in record["reason"]
    assert f"error: rank {record['rank']}: " in reader.text
    assert message in reader.text
    assert re.search(rf"rank {record['rank']} failed after step \d+: .*{message}", other.text)


def test_nobody_comes_to_the_meeting() -> None:
    port, begin = free_port(), time.monotonic()
    with pytest.raises(ForgeError) as caught:
        meet(port, rank=0)
    assert time.monotonic() - begin < 10
    assert f"MASTER_ADDR:MASTER_PORT = 127.0.0.1:{port}" in caught.value.message
    assert "distributed.start_timeout = 1 s" in caught.value.message


def test_the_meeting_place_is_not_there() -> None:
    with pytest.raises(ForgeError, match=r"rank 1 of 2 .* within distributed.start_timeout = 1 s"):
        meet(free_port(), rank=1)


def test_the_port_is_in_use() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        with pytest.raises(ForgeError, match=rf"127.0.0.1:{other.getsockname()[1]}: the port is in use"):
            meet(other.getsockname()[1], rank=0)


def test_another_program_has_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes connections and says nothing: the other ranks need not wait for `start_timeout`."""
    monkeypatch.setattr(process_group, "SILENCE", 1.0)
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port, begin = other.getsockname()[1], time.monotonic()
        with pytest.raises(ForgeError, match=rf"127.0.0.1:{port} is not rank 0 of this run") as caught:
            meet(port, rank=1, start_timeout=60.0)
    assert time.monotonic() - begin < 10
    assert "the port is in use" in caught.value.hint


def test_a_rank_that_comes_first_waits_for_rank_0() -> None:
    port, begin = free_port(), time.monotonic()
    servers: list[Any] = []

    def serve() -> None:
        time.sleep(0.7)
        servers.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))

    late = threading.Thread(target=serve)
    late.start()
    process_group._knock("127.0.0.1", port, 30.0)
    assert 0.6 < time.monotonic() - begin < 10
    late.join()
    servers[0].set("key", "it still works")
    assert servers[0].get("key") == b"it still works"


def test_the_host_does_not_exist() -> None:
    with pytest.raises(ForgeError, match="no such host"):
        meet(29500, rank=1, host="nowhere.invalid")


def meet(port: int, rank: int, host: str = "127.0.0.1", start_timeout: float = 1.0) -> None:
    place = Environment(rank=rank, world_size=2, local_rank=rank, address=f"{host}:{port}")
    join(place, CPU, DistributedConfig(start_timeout=start_timeout))


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"WORLD_SIZE": "2"},
            "WORLD_SIZE=2, but RANK and LOCAL_RANK and MASTER_ADDR and MASTER_PORT not set",
        ),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a number"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 is not below WORLD_SIZE=2"),
        ({"WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "LOCAL_RANK=1 is above RANK=0"),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "99999"}, "MASTER_PORT=99999 is no port"),
    ],
)
def test_an_environment_that_contradicts_itself(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    complete = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name in complete:
        monkeypatch.delenv(name, raising=False)
    for name, value in ({**complete, **variables} if len(variables) > 1 else variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ForgeError) as caught:
        read_environment()
    assert message in caught.value.message


@pytest.fixture
def lines() -> Iterator[list[Lifelines]]:
    """Those of three ranks, connected."""
    store = HashStore()
    found = [Lifelines(store, rank, "127.0.0.1") for rank in range(3)]
    until(lambda: [line.look() for line in found] == [None] * 3 and len(found[0].lines) == 2)
    yield found
    for line in found:
        line.close()


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_process_that_ends_is_noticed(lines: list[Lifelines]) -> None:
    lines[2].close()
    until(lambda: lines[0].look() == 2)
    assert lines[1].look() is None
    lines[0].close()
    until(lambda: lines[1].look() == 0)


def test_a_process_that_says_farewell_may_end(lines: list[Lifelines]) -> None:
    for line in lines:
        line.part()
        assert line.look() is None
    for line in lines[1:]:
        line.close()
    until(lambda: lines[0].look() is not None or not lines[0].lines)
    assert lines[0].look() is None


def test_everybody_hears_a_farewell_before_connections_close(
    lines: list[Lifelines], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that looks lets go of connections once this process has parted, and of peers that have."""
    say = Line.say

    def slowly(line: Line, what: bytes) -> None:
        time.sleep(0.05)
        lines[0].lines.pop(2, None)
        say(line, what)

    def let_go() -> None:
        until(lambda: lines[0].parted)
        lines[0].close()

    told = list(lines[0].lines.values())
    monkeypatch.setattr(Line, "say", slowly)
    thread = threading.Thread(target=let_go)
    thread.start()
    lines[0].part()
    thread.join()
    for peer in lines[1:]:
        until(lambda peer=peer: peer.look() is not None or not peer.lines)
        assert not peer.lines, "rank 0 seems dead"
    for line in told:
        line.connection.close()


def test_strangers_at_the_door_change_nothing(lines: list[Lifelines]) -> None:
    door = lines[0]._door
    assert door is not None
    with socket.create_connection(("127.0.0.1", door.getsockname()[1])) as stranger:
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n and more")
        until(lambda: lines[0].look() is None and not lines[0]._knocking)
    with socket.create_connection(("127.0.0.1", door.getsockname()[1])):
        assert lines[0].look() is None
    assert lines[0].look() is None
    assert sorted(lines[0].lines) == [1, 2]


def test_a_process_that_was_forked_off_holds_no_connection(lines: list[Lifelines]) -> None:
    """Or the death of its parent would not show as long as it lives."""
    child = os.fork()
    if not child:
        time.sleep(30)
        os._exit(0)
    try:
        lines[1].close()
        until(lambda: lines[0].look() == 1)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
