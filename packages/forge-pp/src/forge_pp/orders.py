"""A schedule as an order of actions for each rank. Imports no torch."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from forge_core.data.wording import counted
from forge_core.errors import ForgeError

FORWARD, BACKWARD, INPUT, WEIGHT = "F", "B", "I", "W"
ACTION = re.compile(r"(\d+)(F|B|I|W)(\d+)")


@attrs.frozen
class Action:
    """One piece of work: forward ("F"), backward ("B"), or its halves for inputs ("I") and weights ("W")."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@attrs.frozen
class Order:
    """By rank, its actions in order; those of a group run back to back, in time one after another."""

    ranks: tuple[tuple[Action, ...], ...]

    @property
    def owners(self) -> dict[int, int]:
        """By stage, the rank that has it."""
        return {action.stage: rank for rank, row in enumerate(self.ranks) for action in row}

    def problems(self, size: int, stages: int, micro_batches: int) -> Iterator[str]:
        """Why it is no schedule of so many ranks, stages and micro-batches; nothing if it is."""
        if len(self.ranks) != size:
            yield f"{counted(len(self.ranks), 'row')}, and pp.size is {size}"
        homes = {(action.stage, rank) for rank, row in enumerate(self.ranks) for action in row}
        twice = [stage for stage, times in Counter(stage for stage, _ in homes).items() if times > 1]
        if twice:
            yield f"stage {twice[0]} is on several ranks"
        done = Counter(str(action) for row in self.ranks for action in row)
        for stage in range(stages):
            for number in range(micro_batches):
                forwards = done[f"{stage}F{number}"]
                whole = done[f"{stage}B{number}"]
                halves = (done[f"{stage}I{number}"], done[f"{stage}W{number}"])
                if forwards != 1 or (whole, *halves) not in ((1, 0, 0), (0, 1, 1)):
                    yield f"stage {stage} does not run micro-batch {number} forward and backward once"
                    return
        beyond = [a for row in self.ranks for a in row if a.stage >= stages or a.micro_batch >= micro_batches]
        if beyond:
            yield f"{beyond[0]} is beyond {stages} stages and {micro_batches} micro-batches"


def read_csv(path: Path) -> Order:
    """The order in a file of torch's format: a row a rank, a column a step, empty where a rank waits.

    Raises:
        ForgeError: a cell is no action, or it is no text.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return Order(tuple(tuple(_actions(row)) for row in csv.reader(file)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ForgeError(f"{path} cannot be read: {error}") from error


def _actions(cells: Iterable[str]) -> Iterator[Action]:
    for cell in cells:
        text = cell.strip()
        if not text:
            continue
        match = ACTION.fullmatch(text)
        if match is None:
            raise ForgeError(f"{text!r} is no action", "such as 0F0, 1B3, 1I3 or 1W3")
        yield Action(int(match.group(1)), match.group(2), int(match.group(3)))


def order_of(rows: Mapping[int, Sequence[object]]) -> Order:
    """The order that one of torch's schedules holds; waiting, communication and sharding left out.

    What torch overlaps (`(0F1;1B0)OVERLAP_F_B`) is taken apart, in its order.
    """
    found = []
    for rank in sorted(rows):
        cells = [str(cell) for cell in rows[rank] if cell is not None]
        texts = (text for cell in cells for text in ACTION.finditer(cell) if "_" not in cell or ";" in cell)
        found.append(tuple(Action(int(t.group(1)), t.group(2), int(t.group(3))) for t in texts))
    return Order(tuple(found))
