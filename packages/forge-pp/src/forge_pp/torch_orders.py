"""The order of one of torch's schedules, for any number of ranks, without a process group."""

from __future__ import annotations

from typing import Any

import attrs

from forge_core.data.wording import counted
from forge_pp.orders import BACKWARD, FORWARD, Action, Order, order_of
from forge_pp.schedules import SCHEDULES
from forge_pp.window import new_schedule


@attrs.define
class Told:
    """What a schedule asks of a stage when it makes its order."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int = 0
    submod: Any = None
    stage_index_to_group_rank: Any = None

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1


def torch_order(name: str, size: int, stages_per_rank: int, micro_batches: int) -> Order:
    """The order of a schedule by its name, see `SCHEDULES`.

    Raises:
        ValueError: torch cannot make it for these numbers.
    """
    if name == "1f1b":  # of which torch lists something else than it runs
        return one_forward_one_backward(size, micro_batches)
    count = size * stages_per_rank
    mine = SCHEDULES[name].stages_of(0, size, count)
    schedule = new_schedule(name, [Told(stage, count, size) for stage in mine], micro_batches)
    return order_of(schedule.pipeline_order)


def one_forward_one_backward(size: int, micro_batches: int) -> Order:
    """What torch's 1F1B runs: a rank works ahead by the stages behind it, then backward and forward in turn.

    Raises:
        ValueError: fewer micro-batches than stages.
    """
    if micro_batches < size:
        raise ValueError(f"{counted(micro_batches, 'micro-batch', 'micro-batches')} for {size} stages")
    rows = []
    for rank in range(size):
        ahead = size - rank
        row = [Action(rank, FORWARD, number) for number in range(ahead)]
        for number in range(micro_batches):
            row.append(Action(rank, BACKWARD, number))
            if number + ahead < micro_batches:
                row.append(Action(rank, FORWARD, number + ahead))
        rows.append(tuple(row))
    return Order(tuple(rows))
