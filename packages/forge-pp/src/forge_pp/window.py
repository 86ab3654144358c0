"""A window of micro-batches through one of torch's schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import schedules as torch_schedules

from forge_pp.schedules import CSV, SCHEDULES
from forge_pp.stage import Run, Stage


@attrs.frozen(kw_only=True)
class Line:
    """The stages of this rank and the ranks of its pipeline.

    Attributes:
        schedule: name, or path of a CSV file.
        parts: by number of the stage, its module.
        count: stages in all. owners: rank in `group` of each.
        device, group: where stages are, and the ranks of this pipeline.
    """

    schedule: str
    parts: dict[int, nn.Module]
    count: int
    owners: dict[int, int]
    device: torch.device
    group: ProcessGroup


def passed_on(output: Tensor, target: None) -> Tensor:
    """The loss function of a last stage whose output is its loss."""
    return output


class Window:
    """Runs windows of micro-batches; one schedule object for each number of them.

    Args:
        line: the stages.
        run: runs a micro-batch of a stage.
    """

    def __init__(self, line: Line, run: Run) -> None:
        self.line, self.run = line, run
        self._made: dict[int, tuple[Any, list[Stage]]] = {}
        # a first exchange of all ranks: on an accelerator pairs may not open a group
        torch.distributed.all_reduce(torch.zeros(1, device=line.device), group=line.group)

    def __call__(self, travelling: Sequence[Sequence[Tensor]]) -> None:
        """Forward and backward of all micro-batches of a window.

        Args:
            travelling: for each what travels between stages, on the meta device.
        """
        count = len(travelling)
        if count not in self._made:
            self._made[count] = self._make(count)
        schedule, stages = self._made[count]
        for stage in stages:
            stage.begin(travelling)
        # `step` would split tensors into equal parts, and look for shapes that the stages know already
        schedule._step_microbatches(
            [()] * count, [{"number": i} for i in range(count)], [None] * count, return_outputs=False
        )
        for stage in stages:
            stage.clear_runtime_states()

    def _make(self, count: int) -> tuple[Any, list[Stage]]:
        line = self.line
        stages = [
            Stage(part, index, line.count, line.owners, line.device, line.group, self.run)
            for index, part in sorted(line.parts.items())
        ]
        schedule = new_schedule(line.schedule, stages, count)
        for name in ("_stage", "_stages"):
            for direction in ("forward", "backward"):
                if hasattr(schedule, f"{name}_{direction}_initialized"):
                    setattr(schedule, f"{name}_{direction}_initialized", True)
        return schedule, stages


def new_schedule(name: str, stages: Sequence[Any], count: int) -> Any:
    """One of torch's schedules for `count` micro-batches. Gradients are not scaled: losses are sums."""
    options: dict[str, Any] = {"n_microbatches": count, "loss_fn": passed_on, "scale_grads": False}
    if name.endswith(CSV):
        runtime: Any = torch_schedules._PipelineScheduleRuntime
        schedule = runtime(list(stages), **options)
        schedule._load_csv(name)
        return schedule
    kind: Any = torch_schedules.get_schedule_class(SCHEDULES[name].torch)
    if issubclass(kind, torch_schedules.PipelineScheduleSingle):
        return kind(stages[0], **options)
    return kind(list(stages), **options)
