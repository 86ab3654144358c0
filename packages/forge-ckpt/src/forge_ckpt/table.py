"""The table `[checkpoint]`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from forge_core.config.fields import key, table
from forge_core.errors import Problem
from forge_core.files import home_problem


@table
class CheckpointConfig:
    """Checkpoints: when they are saved, which are kept, what a run goes on from."""

    interval: int = key(1000, ge=0, unit="steps", help="Updates between saves; 0 saves none by the step.")
    minutes: float = key(0.0, ge=0, unit="min", help="Time between saves, beside the interval; 0 is off.")
    initial: bool = key(False, help="Also save before the first update.")
    window: list[int] | None = key(
        None,
        ge=0,
        help="[first, last] update of a window in which strategy says when to save, and interval does not.",
        derived="no window",
    )
    strategy: str = key(
        "power2", component="save_strategy", help="When to save inside window; such checkpoints are all kept."
    )
    mode: str = key(
        "async",
        choices=("sync", "async"),
        help="sync: training waits until a checkpoint is on disk. async: it is copied while the next step "
        "runs and written in the background.",
    )
    url: str | None = key(
        None,
        help="Where checkpoints lie, if not in the run folder: a folder or an address that fsspec knows "
        "(s3://bucket/place, gs://, memory://).",
        derived="checkpoints/ in the run folder",
    )
    keep_last: int = key(3, ge=0, help="How many of the last checkpoints are kept; 0 keeps all.")
    keep_every: int = key(0, ge=0, unit="steps", help="Also keep those of every this many updates; 0 is off.")
    keep_best: int = key(0, ge=0, help="Also keep this many of the best by best_metric; 0 is off.")
    best_metric: str = key("eval/loss", help="Metric of evaluations that keep_best goes by.")
    best_mode: str = key(
        "min", choices=("min", "max"), help="Whether a small or a large best_metric is good."
    )
    resume: bool | str = key(
        "auto",
        help="auto: a named run goes on from its last good checkpoint. A path: from that checkpoint, run or "
        "folder. false: start afresh.",
    )
    start_from: str | None = key(
        None,
        help="Path of a checkpoint or run to start from as long as this run has no checkpoint of its own.",
        derived="initial values",
    )
    weights_only: bool = key(
        False, help="From start_from or a resume path take the weights alone and begin at step 0."
    )
    optimizer: bool = key(True, help="From start_from or a resume path take the optimizer's state, too.")
    include: list[str] = key(
        factory=list,
        help="Name patterns of the parameters to take from start_from or a resume path; the others keep "
        "their initial values. Empty: all.",
    )
    exclude: list[str] = key(
        factory=list, help="Name patterns of parameters not to take from start_from or a resume path."
    )
    partial: bool = key(
        False, help="Let parameters be missing from the checkpoint, or from the model; both are listed."
    )
    init_partial: bool = key(
        False, help="Let parameters be missing from model.init_from, or from the model; both are listed."
    )
    allow_changed: list[str] = key(
        factory=list,
        choices=("seed", "extras", "optimizer", "model"),
        help="Go on although these changed; without it a resume is refused. Under another optimizer, state "
        "that it has no use for is dropped; another model has to have the same weights. For data and the "
        "size of updates see data.allow_changed.",
    )
    verify: bool = key(True, help="Compare every file with its checksum before loading.")

    def problems(self) -> Iterator[Problem]:
        yield from home_problem("url", self.url)
        if self.window is not None and (len(self.window) != 2 or self.window[0] >= self.window[1]):
            yield Problem("window", f"{self.window} is not [first, last] with first below last")
        if self.resume is True or self.resume == "":
            yield Problem("resume", "must be auto, a path or false", 'write "auto"')
        if self.start_from is not None and self.resume not in ("auto", False):
            yield Problem(
                "start_from",
                "clashes with resume, which names a checkpoint already",
                "leave out one of the two",
            )
        if not self.elsewhere:
            for name in ("weights_only", "include", "exclude", "partial"):
                if getattr(self, name):
                    yield Problem(name, "is for start_from or a resume path, and neither is given")

    @property
    def elsewhere(self) -> bool:
        """Whether a particular place to load from is named."""
        return self.start_from is not None or self.resume not in ("auto", True, False)

    @property
    def takes_part(self) -> bool:
        """Whether only a part of what is named is taken, so that training begins at step 0."""
        return self.weights_only or bool(self.include or self.exclude or self.partial)
