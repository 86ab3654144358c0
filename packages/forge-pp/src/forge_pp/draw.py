"""A schedule as text: ranks down, time across. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from forge_core.data.wording import counted
from forge_pp.simulate import Simulation, Timed

WIDTH, RANKS = 96, 8
LEGEND = "F forward, B backward, I and W its halves for inputs and weights; ' a rank's next stage; . waits"


def drawing(simulation: Simulation, size: int, unit: float = 1.0) -> Iterator[str]:
    """One line a rank, one column each `unit` of time; long ones are cut.

    Args:
        simulation: of a schedule over `size` ranks.
        unit: what one column stands for.
    """
    first = {rank: min(t.action.stage for t in row) for rank, row in enumerate(simulation.ranks)}
    texts = {
        id(timed): _text(timed, sorted({t.action.stage for t in row}), first[rank])
        for rank, row in enumerate(simulation.ranks)
        for timed in row
    }
    width = max(map(len, texts.values())) + 1
    columns = max(1, WIDTH // width)
    for rank, row in enumerate(simulation.ranks[:RANKS]):
        cells = ["."] * round(simulation.total / unit)
        for timed in row:
            for column in range(round(timed.start / unit), round(timed.end / unit)):
                cells[column] = texts[id(timed)]
        line = "".join(f"{cell:<{width}}" for cell in cells[:columns]).rstrip()
        yield f"rank {rank}  {line}{' ...' if len(cells) > columns else ''}"
    if size > RANKS:
        yield f"... {counted(size - RANKS, 'more rank')}"


def _text(timed: Timed, stages: list[int], first: int) -> str:
    lap = stages.index(timed.action.stage)
    return f"{timed.action.kind}{timed.action.micro_batch}" + "'" * lap
