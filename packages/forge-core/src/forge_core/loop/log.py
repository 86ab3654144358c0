"""Metrics of a run: what is measured on a log step, where it goes, and what the terminal shows."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from forge_core.config.tables import MetricsConfig
from forge_core.contract import Metric, StepResult, Writer
from forge_core.loop.flops import flops_of
from forge_core.metrics.collector import MetricCollector
from forge_core.metrics.jsonl import JsonlWriter, cut_back
from forge_core.metrics.peaks import peak_flops
from forge_core.metrics.progress import MutedProgress, Progress, open_progress
from forge_core.metrics.throughput import Meter, peak_memory_gb
from forge_core.metrics.writers import WriterSet, start_writers

if TYPE_CHECKING:
    from forge_core.distributed.control import Control
    from forge_core.loop.session import TrainingSession


class MetricLog:
    """Collects, writes and shows metrics. Between log steps it only counts tokens and FLOPs.

    Args:
        session: a session whose model and optimizers are built.
        measured: metrics of plugins, in order.
    """

    def __init__(self, session: TrainingSession, measured: Sequence[Metric]) -> None:
        config = session.config[MetricsConfig]
        self.session = session
        self.interval = config.log_interval
        several = session.control is not None
        self.collector = MetricCollector(
            measured,
            device=session.device,
            group=torch.distributed.group.WORLD if several else None,
            counts=session.mesh.counts_loss,
        )
        main = session.ranks.is_main
        self.progress: Progress = (
            open_progress(config.progress, session.max_steps) if main else MutedProgress()
        )
        self.meter = Meter(
            max_steps=session.max_steps,
            peak_flops=device_peak(session.device, config.peak_tflops),
            devices=session.ranks.world_size,
            synchronize=None if session.device.type == "cpu" else torch.accelerator.synchronize,
        )
        self.recount_flops()
        self.jsonl: JsonlWriter | None = None
        self.writers = WriterSet({}, self.notice)
        self.handler = NoticeHandler(self)
        self.level_before: int | None = None

    def listen(self) -> None:
        """Show what is logged from here on, informative messages, too."""
        log = self.session.log
        if self.level_before is None:
            self.level_before = log.level
            log.setLevel(min(log.level, logging.INFO) or logging.INFO)
            log.addHandler(self.handler)

    def start(self, step: int) -> None:
        """Open metrics.jsonl (cut back to `step`), start the writers and the display."""
        session = self.session
        names = session.config[MetricsConfig].writers if session.ranks.is_main else []
        if session.ranks.is_main:
            cut_back(session.run.metrics, step)
            self.jsonl = JsonlWriter(session.run.metrics)
        builders: dict[str, Callable[[], Writer]] = {
            name: partial(session.component("writer", name), session, session.options("metrics", name))
            for name in names
        }
        self.writers = start_writers(builders, self.notice)
        self.listen()
        session.log.propagate = False
        self.progress.start(step)
        self.meter.start(step)

    def due(self, step: int) -> bool:
        """Whether update `step` is a log step: the first, the last, every `metrics.log_interval`."""
        return step % self.interval == 0 or step == 1 or step == self.session.max_steps

    def log(self, step: int, result: StepResult) -> None:
        """One reduction and one read from the device; then write and show."""
        values: dict[str, Any] = {
            "train/loss": result.loss,
            "train/objective": result.objective,
            "train/grad_norm": result.grad_norm,
            "train/lr": self._learning_rate(),
        }
        sums: Mapping[str, Any] = result.sums
        if self.session.control is not None:
            sums = same_names(sums, self.session.control)
        memory = peak_memory_gb(self.session.device.type)
        peak = {} if memory is None else {"memory/peak_gb": memory}  # of the fullest rank
        several = self.session.control is not None
        metrics = self.collector.collect(values, sums, peak if several else None, self._busy())
        metrics |= self.meter.measure(step)
        if not several:
            metrics |= peak
        metrics["guard/skipped"] = float(self.session.guard.skipped)
        self._write(step, metrics)
        self.progress.update(step, metrics, self.meter.eta_sec)

    def log_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write and show the results of an evaluation; nothing for one that was cut short."""
        if metrics:
            self._write(step, metrics)
            self.progress.evaluation(step, metrics)

    def recount_flops(self) -> None:
        """To be called where another part of the model trains than before."""
        flops = flops_of(self.session)
        self.meter.flops_per_token = None if flops is None else flops.token
        self.meter.flops_counted = {} if flops is None else flops.counted

    def paused(self) -> AbstractContextManager[None]:
        """Time that is no training, and does not count as such."""
        return self.meter.paused()

    def notice(self, text: str) -> None:
        """A line for the user, above the bar."""
        self.progress.notice(text)

    def close(self) -> None:
        """Close files, writers and the display; a second call does nothing."""
        self.progress.close()
        self.writers.close()
        if self.jsonl is not None:
            self.jsonl.close()
        if self.level_before is not None:
            self.session.log.removeHandler(self.handler)
            self.session.log.setLevel(self.level_before)
            self.session.log.propagate = True
            self.level_before = None

    def _busy(self) -> dict[str, float]:
        """`train/slowest_rank`: the rank that took most time since the last log beside waiting for others."""
        control = self.session.control
        if control is None:
            return {}
        waited, control.waited = control.waited, 0.0
        return {"train/slowest_rank": self.meter.busy_sec - waited}

    def _learning_rate(self) -> float:
        first = next(iter(self.session.optimizers.values()))
        rate: float = first.optimizer.param_groups[0]["lr"]
        return rate

    def _write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.jsonl is not None:
            self.jsonl.write(step, metrics)
        self.writers.write(step, metrics)


def same_names(sums: Mapping[str, Any], control: Control) -> dict[str, Any]:
    """The sums of this rank under the names that any rank has; nothing under those that it lacks.

    A stage knows the losses of its own layers only, and a loss may be attached on some ranks alone. All ranks
    ask; where their names are the same, it costs one small reduction on the CPU.
    """
    pairs = {name: isinstance(sums[name], tuple) for name in sorted(sums)}
    mine = json.dumps(pairs)
    if control.alike(mine):
        return dict(sums)
    known: dict[str, bool] = {}
    for text in control.texts(mine):
        known |= json.loads(text)
    return {name: sums.get(name, (0.0, 0.0) if pair else None) for name, pair in sorted(known.items())}


class NoticeHandler(logging.Handler):
    """Sends log records to the display, so that they do not tear the bar."""

    def __init__(self, log: MetricLog) -> None:
        # all ranks come by most warnings; errors are of one rank
        super().__init__(logging.INFO if log.session.ranks.is_main else logging.ERROR)
        self.log_ = log

    def emit(self, record: logging.LogRecord) -> None:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        ranks = self.log_.session.ranks
        text = f"{stamp} {record.levelname.lower()}: {record.getMessage()}"
        if ranks.is_main:
            self.log_.notice(text)
        else:
            print(f"rank {ranks.rank}: {text}", file=sys.stderr, flush=True)


def device_peak(device: torch.device, stated_tflops: float | None) -> float | None:
    """Peak FLOP/s of the device: as stated, or known by its name; None for a CPU and what is not known."""
    if stated_tflops is not None:
        return stated_tflops * 1e12
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
