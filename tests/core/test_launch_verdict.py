"""Which rank failed first, what the run's status is, and what the user is told."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from forge_core.launch.environment import for_rank
from forge_core.launch.status import STATUS_FILE, keep, settle
from forge_core.launch.verdict import Ending, Report, cause_of, explain, names, status_of
from forge_core.launch.worker import is_consequence, place, tell


def ended(rank: int, code: int, time: float = 0.0, *, killed: bool = False, said: str = "") -> Ending:
    """`said` is the error's text, "later: ..." for one that looks like a consequence."""
    report = None
    if said:
        text = said.removeprefix("later: ")
        report = Report(status=code, text=text, time=time, consequence=said != text)
    return Ending(rank=rank, code=code, time=time, report=report, killed=killed)


@pytest.mark.parametrize(
    ("endings", "forwarded", "status"),
    [
        ([ended(0, 0), ended(1, 0)], None, 0),
        ([ended(0, 75), ended(1, 75)], 15, 75),
        ([ended(0, 75), ended(1, 143)], 15, 143),  # one could not save: there is nothing to go on from
        ([ended(0, -15), ended(1, -15)], 15, 143),  # told while they were starting
        ([ended(0, -15), ended(1, -9, killed=True)], None, 143),
        ([ended(0, -9, killed=True), ended(1, 3, said="guard")], None, 3),
        ([ended(0, 1, 1.0, said="later: gloo"), ended(1, 2, 2.0, said="no data")], None, 2),
        ([ended(0, 1, 1.0, said="boom"), ended(1, 3, 2.0, said="bang")], None, 1),
        ([ended(0, 1, 1.0, said="odd"), ended(1, -11, 1.5)], None, 139),  # seen later than its peer's error
        ([ended(0, 1, 1.0, said="odd"), ended(1, -11, 9.0)], None, 1),
        ([ended(0, -6, 1.0), ended(1, 1, 2.0, said="boom")], None, 1),  # a watchdog's abort is no cause
        ([ended(0, 130), ended(1, 130)], 2, 130),
        ([ended(0, -9, killed=True), ended(1, -9, killed=True)], signal.SIGUSR1, 138),
    ],
)
def test_status(endings: list[Ending], forwarded: int | None, status: int) -> None:
    assert status_of(endings, forwarded) == status


def test_what_is_told() -> None:
    assert explain([ended(0, 0), ended(1, 75)], 15) == []
    endings = [
        ended(0, -9, 9.0, killed=True),
        ended(1, 1, 2.0, said="later: rank 2 failed after step 7: ValueError: boom"),
        ended(2, 1, 1.0, said="ValueError: boom\n  hint: look"),
        ended(3, 1, 3.0, said="later: RuntimeError: gloo"),
    ]
    assert explain(endings, None) == [
        "error: rank 2: ValueError: boom\n  hint: look",
        "  then rank 3: RuntimeError: gloo",
        "  killed, as they did not end: rank 0",
    ]
    cause = cause_of(endings, None)
    assert cause is not None
    assert cause.rank == 2
    assert names([3, 0, 2]) == "ranks 0, 2 and 3"


def test_many_consequences_are_counted() -> None:
    endings = [ended(0, 1, 0.0, said="boom"), *(ended(r, 1, r, said=f"later: gloo {r}") for r in range(1, 9))]
    assert explain(endings, None)[-1] == "  then 5 more"


def test_consequences_are_known_by_their_cause() -> None:
    lost = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:1")
    assert is_consequence(lost)
    error = ValueError("a collective of step 3 timed out")
    assert not is_consequence(error)
    error.__cause__ = lost
    assert is_consequence(error)
    assert not is_consequence(RuntimeError("shapes differ"))
    assert not is_consequence(ConnectionError("connection refused"))  # of a data source


def test_without_a_launcher_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert not tell(ValueError("boom"), 1, "boom")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert place() == ""
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert place() == "rank 3: "


def test_the_status_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STATUS_FILE, raising=False)
    assert settle(75, main=True) == 75
    assert not keep(1)
    file = tmp_path / "status"
    monkeypatch.setenv(STATUS_FILE, str(file))
    assert STATUS_FILE not in for_rank(os.environ, 0, 2, 1234)
    assert settle(75, main=False) == 0
    assert not file.exists()
    assert settle(75, main=True) == 0
    assert file.read_text() == "75\n"
    assert keep(3)
    assert keep(1)  # the first failure stays
    assert keep(75)
    assert file.read_text() == "3\n"
    assert settle(3, main=True) == 3
    monkeypatch.setenv(STATUS_FILE, str(tmp_path / "absent" / "status"))
    assert settle(143, main=True) == 143
    assert settle(0, main=True) == 0
