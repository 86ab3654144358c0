"""What `forge explain` says of the stages of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from forge_core.data.wording import counted
from forge_core.files import user_path
from forge_pp.build import owners
from forge_pp.costs import find_cut
from forge_pp.draw import LEGEND, drawing
from forge_pp.orders import Order, read_csv
from forge_pp.simulate import simulate
from forge_pp.table import PpConfig, is_file, stages_per_rank
from forge_pp.torch_orders import torch_order

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession


def order_for(pp: PpConfig, micro_batches: int) -> Order:
    """The order that the ranks of a pipeline run."""
    if is_file(pp):
        return read_csv(user_path(pp.schedule))
    return torch_order(pp.schedule, pp.size, stages_per_rank(pp), micro_batches)


def lines(session: TrainingSession) -> Iterator[str]:
    """Stages, the bubble and the activations to expect, and the schedule drawn."""
    pp, count = session.config[PpConfig], session.grad_accum_steps
    stages = pp.size * stages_per_rank(pp)
    found = simulate(order_for(pp, count))
    bubble = f"{100 * found.bubble:.1f} % of the ranks' time is waiting"
    where = f"{counted(stages, 'stage')} on {counted(pp.size, 'rank')}"
    yield f"{pp.schedule}: {where}, {counted(count, 'micro-batch', 'micro-batches')}; {bubble}"
    peaks = sorted(set(found.peaks))
    least = f"{peaks[0]} to " if len(peaks) > 1 else ""
    most = counted(peaks[-1], "micro-batch", "micro-batches")
    yield f"a rank holds the activations of at most {least}{most} of a stage"
    cut = find_cut(session, session.model)
    for stage, rank in sorted(owners(pp).items())[:16]:
        names = cut.of_stage(stage)
        which = f"block {names[0]}" if len(names) == 1 else f"blocks {names[0]} to {names[-1]}"
        yield f"stage {stage} on rank {rank}: {which}"
    if stages > 16:
        yield f"... {counted(stages - 16, 'more stage')}"
    yield from drawing(found, pp.size)
    yield f"({LEGEND}; as if all stages took the same time, and each half of a backward as long as a forward)"
