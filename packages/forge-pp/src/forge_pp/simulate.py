"""What a schedule costs in time and memory: a run of its actions with stated durations. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from forge_core.errors import ForgeError
from forge_pp.orders import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Order
from forge_pp.schedules import SCHEDULES


@attrs.frozen(kw_only=True)
class Durations:
    """Time of one micro-batch in one stage, in any unit.

    Attributes:
        forward, inputs, weights: the forward, and the halves of the backward.
        travel: from one rank to another.
        of_stage: factor of all three for a stage; by default stages are equal.
    """

    forward: float = 1.0
    inputs: float = 1.0
    weights: float = 1.0
    travel: float = 0.0
    of_stage: Callable[[int], float] = lambda stage: 1.0

    def of(self, action: Action) -> float:
        """How long an action takes."""
        times = {
            FORWARD: self.forward,
            INPUT: self.inputs,
            WEIGHT: self.weights,
            BACKWARD: self.inputs + self.weights,
        }
        return times[action.kind] * self.of_stage(action.stage)


@attrs.frozen
class Timed:
    """An action with its place in time."""

    action: Action
    start: float
    end: float


@attrs.frozen(kw_only=True)
class Simulation:
    """One step of a schedule.

    Attributes:
        ranks: by rank, its actions in time.
        total: from the first action to the last.
        peaks: by rank, the most micro-batches whose activations a stage of it holds, all its stages together.
    """

    ranks: tuple[tuple[Timed, ...], ...]
    total: float
    peaks: tuple[int, ...]

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they wait."""
        busy = sum(timed.end - timed.start for row in self.ranks for timed in row)
        return 1.0 - busy / (len(self.ranks) * self.total)


def simulate(order: Order, durations: Durations | None = None) -> Simulation:
    """Run the actions of every rank in order, each as soon as what it needs has come.

    Raises:
        ForgeError: ranks wait for each other for ever.
    """
    durations = durations or Durations()
    last = max(action.stage for row in order.ranks for action in row)
    owners, done = order.owners, dict[str, float]()
    rows: list[list[Timed]] = [[] for _ in order.ranks]
    clocks, places = [0.0] * len(rows), [0] * len(rows)
    while any(place < len(order.ranks[rank]) for rank, place in enumerate(places)):
        moved = False
        for rank, actions in enumerate(order.ranks):
            while places[rank] < len(actions):
                action = actions[places[rank]]
                ready = _ready(action, last, owners, done, durations.travel)
                if ready is None:
                    break
                start = max(clocks[rank], ready)
                clocks[rank] = start + durations.of(action)
                rows[rank].append(Timed(action, start, clocks[rank]))
                done[_key(action)] = clocks[rank]
                places[rank] += 1
                moved = True
        if not moved:
            raise ForgeError("this order never ends: its ranks wait for each other")
    peaks = tuple(_peak(row) for row in order.ranks)
    return Simulation(ranks=tuple(map(tuple, rows)), total=max(clocks), peaks=peaks)


def _key(action: Action) -> str:
    """Whole backwards and those of inputs are the same to who waits for them."""
    kind = INPUT if action.kind == BACKWARD else action.kind
    return f"{action.stage}{kind}{action.micro_batch}"


def _ready(
    action: Action, last: int, owners: dict[int, int], done: dict[str, float], travel: float
) -> float | None:
    """When everything that an action needs is there; None while something is not."""
    stage, number = action.stage, action.micro_batch
    needs: list[tuple[str, int]] = []
    if action.kind == FORWARD:
        needs = [(f"{stage - 1}F{number}", stage - 1)] if stage else []
    elif action.kind == WEIGHT:
        needs = [(f"{stage}I{number}", stage)]
    else:
        needs = [(f"{stage}F{number}", stage)]
        if stage < last:
            needs.append((f"{stage + 1}I{number}", stage + 1))
    times = [0.0]
    for key, other in needs:
        if key not in done:
            return None
        times.append(done[key] + (travel if owners[other] != owners[stage] else 0.0))
    return max(times)


def _peak(actions: Sequence[Action]) -> int:
    """Most micro-batches between their forward and the end of their backward."""
    held = most = 0
    for action in actions:
        held += (action.kind == FORWARD) - (action.kind in (BACKWARD, WEIGHT))
        most = max(most, held)
    return most


def expected_bubble(name: str, size: int, stages_per_rank: int, micro_batches: int) -> float:
    """The bubble that the papers give where stages are equal and forwards take as long as half backwards.

    With p ranks, v stages a rank and m micro-batches, at least p: (p - 1) / (v m + p - 1) for gpipe (Huang et
    al. 2019), 1f1b and interleaved_1f1b (Narayanan et al. 2021) and looped_bfs (Lamy-Poirier 2023). Where
    backwards are taken apart the p - 1 passes of a stage that are lost are forwards alone, (p - 1)(F + I - W)
    for interleaved_zero_bubble and the start of the last rank for zbv (Qi et al. 2024) and dualpipev
    (DeepSeek-AI 2024): (p - 1) / (3 v m + p - 1).
    """
    passes = 3 if SCHEDULES[name].splits_backward else 1
    return (size - 1) / (passes * stages_per_rank * micro_batches + size - 1)


def expected_peak(name: str, size: int, stages_per_rank: int, micro_batches: int, rank: int) -> int:
    """Micro-batches that a rank holds activations of at most, all its stages together, of many."""
    held = {
        "gpipe": micro_batches,
        "1f1b": size - rank,
        "interleaved_1f1b": 2 * (size - rank - 1) + (stages_per_rank - 1) * size + 1,
        "looped_bfs": stages_per_rank * micro_batches,
        "interleaved_zero_bubble": stages_per_rank * size,
        "zbv": 2 * size,
        "dualpipev": 2 * size + 1,
    }
    return held[name]
