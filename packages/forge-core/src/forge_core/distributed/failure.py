"""How ranks learn that one of them has failed, without any collective: over the store where they met.

A thread on each rank looks at the store once in a while. The first rank that fails leaves its error there;
the others print whose it was and end, whatever they wait for.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import attrs
from torch.distributed.distributed_c10d import Store

from forge_core.distributed.lifelines import Lifelines
from forge_core.errors import ForgeError
from forge_core.launch.worker import tell

POLL = 0.5
"""Seconds between two looks at the store."""
GRACE = 3.0
"""Seconds that a process gets to end by itself once a peer has failed, and to hear from its peers."""
DEAD = "its process has ended without a word"
SHORT = 160
"""Characters of torch's own message that an error repeats."""


@attrs.frozen(kw_only=True)
class Failure:
    """The error that ended a run.

    Attributes:
        rank, step: where, and after which update. status: exit status. text: the error in one line.
    """

    rank: int
    step: int
    status: int
    text: str

    def __str__(self) -> str:
        return f"rank {self.rank} failed after step {self.step}: {self.text}"


class PeerError(ForgeError):
    """Another rank has failed, so that this one cannot go on; its exit status is that rank's."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure
        self.exit_status = failure.status


class Watch:
    """Watches over the other ranks, and tells them of a failure here.

    Args:
        store: where the ranks met.
        rank, world_size: of this process.
        lines: connections that show when a process has ended; without them only its peers' waits do.

    Attributes:
        step: updates done, for others to see; a plain number that the loop sets.
        last_words: called before this process is ended from outside the loop; closes files and trackers.
    """

    def __init__(self, store: Store, rank: int, world_size: int, lines: Lifelines | None = None) -> None:
        self.store, self.rank, self.world_size, self.lines = store, rank, world_size, lines
        self.step = 0
        self.last_words: Callable[[Failure], None] = lambda failure: None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="forge-watch", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def stop(self, farewell: bool = True) -> None:
        """This process ends by itself from here on; nothing ends it from outside any more.

        Args:
            farewell: the others need not mind that it ends.
        """
        if farewell and self.lines is not None:
            self.lines.part()
        self._done.set()

    def report(self, failure: Failure) -> bool:
        """Tell the others; whether this rank was the first. Waits a moment for them to hear it."""
        self.stop()
        try:
            text = json.dumps(attrs.asdict(failure))
            first = bool(json.loads(self.store.compare_set("failed", "", text))["rank"] == self.rank)
            if not first:  # it need not be told what it has found out
                self.store.add("heard", 1)
            limit = time.monotonic() + GRACE
            while first and time.monotonic() < limit and self.store.add("heard", 0) < self.world_size - 1:
                time.sleep(0.05)
        except (RuntimeError, ValueError):  # the store went with the process that kept it
            return True
        return first

    def failure(self, wait: float = 0.0) -> Failure | None:
        """What another rank has failed with, if that is known within `wait` seconds."""
        limit = time.monotonic() + wait
        while True:
            with suppress(RuntimeError):
                found = _read(self.store)
                if found is not None and found.rank != self.rank:
                    return found
            if time.monotonic() >= limit:
                return None
            time.sleep(0.05)

    def missing(self, wait: float = GRACE) -> str:
        """Which ranks do not say within `wait` seconds that they wait, too; called where a wait failed.

        "rank 1 (after step 6), rank 3 (gone)"; "" if all do.
        """
        with suppress(RuntimeError):
            self.store.set(f"waits/{self.rank}", "1")
            before = [self._beats(rank) for rank in range(self.world_size)]
            time.sleep(wait)
            silent = [r for r in range(self.world_size) if not self.store.check([f"waits/{r}"])]
            return ", ".join(
                f"rank {r} (after step {self._at(r)}{', gone' if self._beats(r) == before[r] else ''})"
                for r in silent
            )
        return ""

    def _beats(self, rank: int) -> int:
        return int(self.store.add(f"beats/{rank}", 0))

    def _at(self, rank: int, store: Store | None = None) -> str:
        key, store = f"at/{rank}", self.store if store is None else store
        return store.get(key).decode() if store.check([key]) else "0"

    def _run(self) -> None:
        store: Store = cast(Any, self.store).clone()  # a connection of its own
        said = -1
        misses = 0
        while not self._done.wait(POLL):
            try:
                store.add(f"beats/{self.rank}", 1)
                if self.step != said:
                    said = self.step
                    store.set(f"at/{self.rank}", str(said))
                self._accuse(store)
                failure = _read(store)
                misses = 0
            except RuntimeError:
                misses += 1
                failure = None
                if misses * POLL >= GRACE:
                    text = "the process that keeps the meeting place is gone"
                    failure = Failure(rank=0, step=self.step, status=1, text=text)
            if failure is not None and failure.rank != self.rank:
                with suppress(RuntimeError):
                    store.add("heard", 1)
                self._end(failure)
                return
        if self.lines is not None and self.lines.parted:
            self.lines.close()

    def _accuse(self, store: Store) -> None:
        """Tell all of a rank whose process has ended, unless it has said why itself.

        Over the thread's own connection: the other one may be busy with a wait.
        """
        gone = None if self.lines is None else self.lines.look()
        if gone is not None:
            failure = Failure(rank=gone, step=int(self._at(gone, store)), status=1, text=DEAD)
            store.compare_set("failed", "", json.dumps(attrs.asdict(failure)))

    def _end(self, failure: Failure) -> None:
        """End this process, unless it does so itself in time."""
        if self._done.wait(GRACE):
            return
        if not tell(PeerError(failure), failure.status, str(failure)):
            _say(f"rank {self.rank}: error: {failure}; this rank still waited, and ends")
        words = threading.Thread(target=self.last_words, args=(failure,), daemon=True)
        words.start()
        words.join(GRACE)
        with suppress(Exception):
            sys.stdout.flush()
        os._exit(failure.status)


def _read(store: Store) -> Failure | None:
    if not store.check(["failed"]):
        return None
    found: dict[str, Any] = json.loads(store.get("failed"))
    return Failure(**found)


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())


def explain_lost_contact(error: BaseException, watch: Watch, step: int) -> ForgeError:
    """The error for a wait that failed though no rank has reported one: who did not come, and when."""
    missing = watch.missing()
    what = "timed out" if "time" in str(error).lower() else "lost contact"
    who = f"{missing} did not arrive" if missing else "no rank says why"
    reason = str(error).splitlines()[0][:SHORT] if str(error) else type(error).__name__
    return ForgeError(
        f"a collective of step {step + 1} {what}: {who} ({reason})",
        "look at the output of that rank; distributed.timeout is how long the others wait",
    )


def end_after(status: int, seconds: float = 3 * GRACE) -> None:
    """End this process if it has not ended by itself in time: what it holds open may wait for a peer."""
    timer = threading.Timer(seconds, os._exit, (status,))
    timer.daemon = True
    timer.start()
