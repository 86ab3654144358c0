"""The schedules by the names that users write: which stages a rank has, and what each asks of a step.

Imports no torch: `forge check` asks here.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

LOOP, V = "loop", "v"
CSV = ".csv"


@attrs.frozen(kw_only=True)
class Schedule:
    """What is known of one of torch's schedules.

    Attributes:
        name: as users write it. torch: name of torch's class, for `get_schedule_class`.
        stages: stages a rank when nothing is said. fixed: whether no other number will do.
        style: "loop": stage s is on rank s mod size; "v": there and back.
        fill: at least as many micro-batches as stages.
        rounds: micro-batches come in equal rounds of about one a rank.
        splits_backward: gradients of inputs and of weights are computed apart, by two backwards.
    """

    name: str
    torch: str
    stages: int
    fixed: bool = True
    style: str = LOOP
    fill: bool = False
    rounds: bool = False
    splits_backward: bool = False

    def owner(self, stage: int, size: int) -> int:
        """The rank, of `size`, that has a stage."""
        lap, place = divmod(stage, size)
        return size - 1 - place if self.style == V and lap % 2 else place

    def stages_of(self, rank: int, size: int, stages: int) -> list[int]:
        """Numbers of the stages of a rank, ascending; `stages` are there in all."""
        return [stage for stage in range(stages) if self.owner(stage, size) == rank]


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule(name="gpipe", torch="GPipe", stages=1),
        Schedule(name="1f1b", torch="1F1B", stages=1, fill=True),
        Schedule(name="interleaved_1f1b", torch="Interleaved1F1B", stages=2, fixed=False, rounds=True),
        Schedule(name="looped_bfs", torch="LoopedBFS", stages=2, fixed=False),
        Schedule(
            name="interleaved_zero_bubble",
            torch="InterleavedZeroBubble",
            stages=2,
            fixed=False,
            rounds=True,
            splits_backward=True,
        ),
        Schedule(name="zbv", torch="ZBVZeroBubble", stages=2, style=V, splits_backward=True),
        Schedule(name="dualpipev", torch="DualPipeV", stages=2, style=V, fill=True, splits_backward=True),
    )
}


def count_problems(schedule: Schedule, size: int, stages: int, micro_batches: int) -> Iterator[str]:
    """Why torch cannot run so many micro-batches over so many stages; nothing if it can."""
    if schedule.fill and micro_batches < stages:
        yield (
            f"{schedule.name} needs at least as many micro-batches as stages, and there are "
            f"{micro_batches} for {stages}"
        )
    rounds = max(1, micro_batches // size)
    if schedule.rounds and micro_batches % rounds:
        yield (
            f"{schedule.name} runs {micro_batches} micro-batches over {size} ranks in {rounds} rounds, "
            f"which do not divide them"
        )
