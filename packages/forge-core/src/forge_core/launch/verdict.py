"""Which rank failed first, and what the run's exit status is."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence

import attrs

from forge_core.launch.status import ORDERLY

FATAL = frozenset({signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE})
"""Signals that end a rank for a cause of its own. A watchdog ends a rank whose peer is gone by SIGABRT."""
HEAD_START = 1.0
"""Seconds by which a fatal signal counts as earlier than it was seen: other ranks may have seen it first."""
SHOWN = 3


@attrs.frozen(kw_only=True)
class Report:
    """What a failing rank says before it ends.

    Attributes:
        status: the exit status it is about to have.
        text: what is shown to the user.
        time: when, in seconds since the epoch.
        consequence: it looks as if another rank had failed before.
    """

    status: int
    text: str
    time: float
    consequence: bool = False


@attrs.frozen(kw_only=True)
class Ending:
    """How one rank ended.

    Attributes:
        rank: which.
        code: exit status, or minus the number of the signal that killed it.
        time: when it was seen, in seconds since the epoch.
        report: what it said before, if it did.
        killed: the launcher killed it.
    """

    rank: int
    code: int
    time: float
    report: Report | None = None
    killed: bool = False

    @property
    def status(self) -> int:
        """As a shell counts it: 128 + signal for a signal."""
        return self.code if self.code >= 0 else 128 - self.code

    def failed(self, forwarded: int | None) -> bool:
        """Whether it ended for another reason than being done, told to stop, or killed by the launcher.

        Args:
            forwarded: signal that the launcher passed on; a rank that is still starting dies of it.
        """
        if self.killed and self.report is None:
            return False
        if self.code < 0:
            return -self.code != forwarded
        return self.code != 0 and self.code not in ORDERLY

    @property
    def order(self) -> tuple[bool, float, int]:
        """Sorts causes before consequences, then by time."""
        if self.report is not None:
            return self.report.consequence, self.report.time, self.rank
        if self.code < 0:
            fatal = -self.code in FATAL
            return not fatal, self.time - (HEAD_START if fatal else 0.0), self.rank
        return False, self.time, self.rank

    @property
    def text(self) -> str:
        if self.report is not None:
            return self.report.text
        if self.code < 0:
            name = signal.Signals(-self.code).name
            hint = (
                "\n  hint: the system does that when memory runs out" if -self.code == signal.SIGKILL else ""
            )
            return f"killed by {name}{hint}"
        return f"ended with status {self.code}"


def status_of(endings: Iterable[Ending], forwarded: int | None) -> int:
    """The exit status of the run: that of the first rank that failed; else 0, 75 or 128 + signal."""
    ended = list(endings)
    first = cause_of(ended, forwarded)
    if first is not None:
        return first.report.status if first.report is not None else first.status
    stopped = {e.status for e in ended if e.code != 0 and not e.killed}
    if any(e.killed for e in ended):
        return 128 + (forwarded or signal.SIGTERM)
    # where some could not save in time, nothing complete is there to go on from
    return max(stopped, default=0)


def cause_of(endings: Iterable[Ending], forwarded: int | None) -> Ending | None:
    """The rank that failed first; None if none did."""
    return min((e for e in endings if e.failed(forwarded)), key=lambda e: e.order, default=None)


def explain(endings: Sequence[Ending], forwarded: int | None) -> list[str]:
    """The lines that tell the user which rank failed first and why; none if no rank failed."""
    failures = sorted((e for e in endings if e.failed(forwarded)), key=lambda e: e.order)
    if not failures:
        late = [e.rank for e in endings if e.killed]
        return [f"error: killed before they had stopped: {names(late)}"] if late else []
    first, *others = failures
    alike = [e for e in others if e.text == first.text]
    if len(failures) > 1 and len(alike) == len(endings) - 1:
        return [f"error: {first.text}", "  on every rank"]
    lines = [f"error: {names([first.rank, *(e.rank for e in alike)])}: {first.text}"]
    message = first.text.splitlines()[0]
    differing = [e for e in others if message not in e.text]  # others may tell of the same
    lines += [f"  then {names([e.rank])}: {e.text.splitlines()[0]}" for e in differing[:SHOWN]]
    if len(differing) > SHOWN:
        lines.append(f"  then {len(differing) - SHOWN} more")
    killed = [e.rank for e in endings if e.killed and e.report is None]
    if killed:
        lines.append(f"  killed, as they did not end: {names(killed)}")
    return lines


def names(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0, 2 and 3`."""
    texts = [str(rank) for rank in sorted(ranks)]
    if len(texts) == 1:
        return f"rank {texts[0]}"
    return f"ranks {', '.join(texts[:-1])} and {texts[-1]}"
