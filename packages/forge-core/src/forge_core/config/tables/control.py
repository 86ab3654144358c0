"""`[guard]` and `[freeze]`: what watches over a run and what changes while it runs."""

from __future__ import annotations

from collections.abc import Iterator

from forge_core.config.fields import key, table
from forge_core.errors import Problem


@table
class GuardConfig:
    """What happens when a loss or a gradient is not finite."""

    action: str = key(
        "skip",
        choices=("skip", "stop", "rollback"),
        help="Skip the update, stop the run, or roll back to the last good state and pass over the bad data.",
    )
    max_consecutive: int = key(10, gt=0, help="Bad steps in a row after which the run gives up (status 3).")
    spike_sigma: float = key(
        0.0, ge=0, help="Also treat a loss or norm this many deviations above its window as bad; 0 is off."
    )
    spike_window: int = key(128, ge=8, unit="steps", help="Good steps that the spike rule looks back on.")
    incidents: int = key(1, ge=0, help="How many bad steps write their batch and a summary to incidents/.")


@table
class FreezeStage:
    """From `start_step` on, exactly these modules are frozen."""

    start_step: int = key(ge=1, help="First update under this stage.")
    modules: list[str] = key(factory=list, help="Aliases or name patterns of the modules that are frozen.")


@table
class FreezeConfig:
    """Modules that do not train, and when that changes."""

    modules: list[str] = key(factory=list, help="Aliases or name patterns of modules frozen from the start.")
    stages: list[FreezeStage] = key(factory=list, help="Later sets of frozen modules, by start_step.")

    def problems(self) -> Iterator[Problem]:
        starts = [stage.start_step for stage in self.stages]
        for i in range(1, len(starts)):
            if starts[i] <= starts[i - 1]:
                yield Problem(f"stages.{i}.start_step", f"{starts[i]} does not come after {starts[i - 1]}")
