"""Reading in processes: the same order, own random numbers, nothing lost, nobody left behind."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datakit import Flow, Numbers, ids, mixed_stream, mixture

from forge_core.commands.main import error_text
from forge_core.data.order import ShuffledOrder, StreamOrder
from forge_core.data.reading import RowReader
from forge_core.data.stream import SampleStream
from forge_core.data.workers import WorkerReader
from forge_core.errors import ConfigError, DataError, ForgeError, Problem, WriteError


@pytest.fixture(autouse=True)
def nobody_left() -> Iterator[None]:
    before = set(multiprocessing.active_children())
    yield
    left = set(multiprocessing.active_children()) - before
    assert not left, "workers outlived their stream"


def stream_of(source: Any, *, workers: int, batch_size: int = 2, **arguments: Any) -> SampleStream:
    order = ShuffledOrder(len(source), 0)
    return SampleStream([source], order, batch_size=batch_size, workers=workers, **arguments)


class Draws(Numbers):
    """Each sample holds one draw of each global generator, and where it was made."""

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        drawn = [random.random(), np.random.random(), float(torch.rand(()))]
        return {"tokens": np.array([index]), "drawn": np.array(drawn), "process": np.array([os.getpid()])}

    batch = None  # type: ignore[assignment]


@pytest.mark.parametrize("workers", [1, 2])
def test_order_is_that_of_reading_without_workers(workers: int) -> None:
    with (
        closing(stream_of(Numbers(40), workers=0)) as plain,
        closing(stream_of(Numbers(40), workers=workers)) as read,
    ):
        for count in (1, 1, 2, 2, 2, 1, 1, 1, 20):  # epochs end in between
            assert ids(read, count) == ids(plain, count)
            assert read.position == plain.position
        assert read.state_dict() == plain.state_dict()


def test_mixture_and_phases_through_workers_and_a_restart() -> None:
    def make(workers: int) -> SampleStream:
        order = mixture({"a": 3, "b": 1}, {"a": 30, "b": 30}, phases=[(4, {"b": 1, "a": 1})], global_batch=4)
        return mixed_stream(order, batch_size=2, data_rank=1, data_size=2, global_batch=4, workers=workers)

    with closing(make(0)) as plain, closing(make(2)) as read, closing(make(2)) as other:
        expected = [ids(plain, 1) for _ in range(12)]
        assert [ids(read, 1) for _ in range(5)] == expected[:5]
        # a changed mixture is a new start, which the workers are told of
        state = {**read.state_dict()}
        other.take(1)
        other.load_state_dict(state)
        assert [ids(other, 1) for _ in range(7)] == expected[5:]


def test_what_workers_read_ahead_does_not_count() -> None:
    """Saved after five steps while at least four more lie ready: the next is the sixth."""
    with closing(stream_of(Numbers(40), workers=0)) as plain:
        straight = [ids(plain, 1)[0] for _ in range(20)]
    with closing(stream_of(Numbers(40), workers=2, steps_ahead=4)) as read:
        assert [ids(read, 1)[0] for _ in range(5)] == straight[:5]
        time.sleep(0.3)  # the queues fill
        state = read.state_dict()
        assert state["position"] == 10
        assert ids(read, 1)[0] == straight[5]
        read.load_state_dict(state)  # back again, with the same processes
        assert ids(read, 1)[0] == straight[5]
    with closing(stream_of(Numbers(40), workers=2, steps_ahead=4)) as again:
        again.load_state_dict(state)
        assert [ids(again, 1)[0] for _ in range(15)] == straight[5:]


@pytest.mark.parametrize("saved_after", [9, 12])
def test_restart_at_the_end_of_an_epoch_and_inside_one(saved_after: int) -> None:
    """24 samples in batches of 2: after 9 of 12 steps three remain, then 12 and 12."""
    with closing(stream_of(Numbers(24), workers=0)) as plain:
        straight = [ids(plain, 1)[0] for _ in range(36)]
    with closing(stream_of(Numbers(24), workers=2)) as first:
        head = [ids(first, 1)[0] for _ in range(saved_after)]
        state = first.state_dict()
    with closing(stream_of(Numbers(24), workers=2)) as again:
        again.load_state_dict(state)
        assert again.state_dict() == state
        assert head + [ids(again, 1)[0] for _ in range(36 - saved_after)] == straight


def first_draws() -> tuple[list[tuple[float, ...]], int]:
    """First draws of each generator of 2 ranks x 2 workers x 2 epochs, and how many processes drew them."""
    found: list[tuple[float, ...]] = []
    processes: set[int] = set()
    for rank in range(2):
        with closing(stream_of(Draws(8), workers=2, batch_size=1, data_rank=rank, data_size=2)) as stream:
            steps = [stream.take(1)[0] for _ in range(8)]  # two epochs of four steps, by turns
        # the first two steps of an epoch are the first of either worker
        for step in (0, 1, 4, 5):
            found.append(tuple(steps[step]["drawn"][0].tolist()))
            processes.add(int(steps[step]["process"][0]))
    return found, len(processes)


def test_ranks_workers_and_epochs_draw_different_numbers_and_the_same_again() -> None:
    draws, processes = first_draws()
    assert processes == 4
    for generator in range(3):
        assert len({draw[generator] for draw in draws}) == 8
    assert first_draws()[0] == draws


def test_random_numbers_do_not_depend_on_the_number_of_workers_or_on_a_restart() -> None:
    def drawn(workers: int, skip: int = 0) -> list[list[float]]:
        with closing(stream_of(Draws(8), workers=workers)) as stream:
            if skip:
                with closing(stream_of(Draws(8), workers=1)) as before:
                    for _ in range(skip):
                        before.take(1)
                    stream.load_state_dict(before.state_dict())
            return [stream.take(1)[0]["drawn"].tolist() for _ in range(6 - skip)]

    assert drawn(1) == drawn(2)
    assert drawn(2, skip=3) == drawn(1)[3:]


def test_random_state_of_training_is_left_alone() -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr, index]
    with closing(stream_of(Draws(8), workers=2)) as stream:
        stream.take(1)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.random.get_state()[1].tolist() == before[2]  # type: ignore[union-attr, index]


def test_error_in_a_worker_names_source_and_sample() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> Mapping[str, Any]:
            if index == 5:
                raise OSError("disk gone")
            return super().__getitem__(index)

        batch = None  # type: ignore[assignment]

    with closing(stream_of(Broken(8), workers=2)) as stream:
        at = ShuffledOrder(8, 0).at(0, 8)[1].tolist().index(5) // 2
        for _ in range(at):
            stream.take(1)
        with pytest.raises(
            DataError, match=r"source data: cannot read sample 5: OSError: disk gone"
        ) as caught:
            stream.take(1)
        assert any("in a process that reads data" in note for note in caught.value.__notes__)
        assert stream.position == 2 * at


class OddError(ForgeError):
    """Not to be made of its message alone."""

    exit_status = 7

    def __init__(self, sample: int, why: str) -> None:
        super().__init__(f"sample {sample}: {why}", "look there")


class BrokenFlow(Flow):
    """A stream whose first sample is an error."""

    def __init__(self, error: Exception) -> None:
        super().__init__(8)
        self.error = error

    def epoch(self, number: int, part: int = 0, parts: int = 1) -> Iterator[dict[str, Any]]:
        raise self.error


class LocalError(RuntimeError):
    """With what no other process can have."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.held = lambda: None


@pytest.mark.parametrize(
    "error",
    [
        KeyError("weight"),
        AttributeError("no such thing"),
        RuntimeError("a bug of a plugin"),
        EOFError("and another"),
        ForgeError("not the configuration", "wait"),
        WriteError("disk full"),
        DataError("the data", "mend it"),
        ConfigError([Problem("data.path", "is not there"), Problem("data.name", "is none")]),
        OddError(3, "odd"),
        LocalError("from here"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_end_as_they_would_without_workers(error: Exception) -> None:
    ends = []
    for workers in (0, 1):
        flow = SampleStream([BrokenFlow(error)], StreamOrder(), batch_size=1, data_size=1, workers=workers)
        with closing(flow) as stream, pytest.raises(Exception) as caught:
            stream.take(1)
        found = caught.value
        ends.append((getattr(found, "exit_status", None), error_text(found)))
    apart = ends[1][1].replace("RuntimeError: LocalError", "LocalError")
    assert (ends[1][0], apart) == ends[0]


def test_signals_to_workers_do_not_end_them() -> None:
    """A scheduler's SIGTERM reaches all processes; the training process decides when it is over."""
    with closing(stream_of(Draws(40), workers=2)) as stream:
        pids = {int(stream.take(1)[0]["process"][0]) for _ in range(4)}
        assert len(pids) == 2
        for pid in pids:
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                os.kill(pid, number)
        assert {int(stream.take(1)[0]["process"][0]) for _ in range(8)} == pids


def test_stream_is_read_by_one_worker_and_goes_on() -> None:
    def make(workers: int) -> SampleStream:
        return SampleStream([Flow(8)], StreamOrder(), batch_size=1, data_size=2, workers=workers)

    with closing(make(0)) as plain, closing(make(2)) as read, closing(make(2)) as again:
        expected = [ids(plain, 1) for _ in range(9)]
        assert [ids(read, 1) for _ in range(4)] == expected[:4]
        again.load_state_dict(read.state_dict())
        assert [ids(again, 1) for _ in range(5)] == expected[4:]


@pytest.mark.parametrize(
    "error", [ConnectionResetError(104, "Connection reset by peer"), EOFError()], ids=repr
)
def test_what_a_worker_sent_is_lost_with_it(error: Exception) -> None:
    """The system calls a process gone a moment after its connections are."""

    def lost() -> Iterator[Any]:
        raise error
        yield

    rows = RowReader(
        sources=[Numbers(8)],
        names=["numbers"],
        order=ShuffledOrder(8, 0),
        batch_size=1,
        data_rank=0,
        data_size=1,
        vocab_size=None,
    )
    with closing(WorkerReader(rows, workers=1, ahead=1, pin=False)) as reader:
        reader._steps, reader._expected = lost(), (0, 1)
        with pytest.raises(DataError, match="a process that reads data has ended") as caught:
            reader.take((0, 1), (1, 1))
    assert "fewer data.num_workers need less" in caught.value.hint
    assert caught.value.exit_status == 1, "2 would blame the configuration, and nobody would try again"


ORPHANS = """
import os, signal, sys, time
sys.path.insert(0, {folder!r})
from test_data_workers import Draws, stream_of
stream = stream_of(Draws(40), workers=2)
pids = [int(stream.take(1)[0]["process"][0]) for _ in range(2)]
print(*pids, flush=True)
if sys.argv[1] == "kill":
    time.sleep(60)
if sys.argv[1] == "lose":
    os.kill(pids[0], signal.SIGKILL)
    for _ in range(40):
        stream.take(1)
raise SystemExit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "status"), [("exit", 3), ("kill", -signal.SIGKILL), ("lose", 1)])
def test_workers_end_with_their_process(end: str, status: int) -> None:
    """However it ends, nobody closes the stream: by itself, killed, or as one of its workers was killed."""
    script = ORPHANS.format(folder=str(Path(__file__).parent))
    command = [sys.executable, "-c", script, end]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(set(pids)) == 2
        if end == "kill":
            process.kill()
        assert process.wait(20) == status
        if end == "lose":
            told = process.stderr.read()
            assert "a process that reads data has ended" in told
            # torch has two ways to say it, and its sockets may be first
            ways = (f"(pid {pids[0]})", f"(pid(s) {pids[0]})", "Connection reset by peer")
            assert any(way in told for way in ways), told
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and any(map(alive, pids)):
        time.sleep(0.05)
    assert not any(map(alive, pids))


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and is not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
