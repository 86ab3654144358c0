"""The `Checkpointer` of forge-ckpt: what the loop calls."""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from forge_ckpt.choosing import choose, newest_whole
from forge_ckpt.comm import Control
from forge_ckpt.errors import CheckpointError, RequestError
from forge_ckpt.gathering import GroupValues
from forge_ckpt.layout import FOLDER
from forge_ckpt.optimizers import load_optimizers
from forge_ckpt.restoring import load_model
from forge_ckpt.resuming import resume, start_from
from forge_ckpt.retention import kept
from forge_ckpt.saving import Save, Saver
from forge_ckpt.schedule import SaveSchedule
from forge_ckpt.staging import one_thread_each
from forge_ckpt.store import LocalStore, Store
from forge_ckpt.stored import complete
from forge_ckpt.table import CheckpointConfig
from forge_core.files import user_path

if TYPE_CHECKING:
    from collections.abc import Mapping

    from forge_core.loop.session import TrainingSession


class RunCheckpointer:
    """Saves a session to a store, loads from it, and keeps the store in order.

    All methods but `close` are called on all ranks at the same point.
    """

    def __init__(self, session: TrainingSession, config: CheckpointConfig) -> None:
        self.session, self.config = session, config
        strategy = session.component("save_strategy", config.strategy)
        self.schedule = SaveSchedule(config, strategy(session.options("checkpoint", config.strategy)))
        self.store = store_of(session, config)
        ranks = session.ranks
        self.control = Control.new("control", ranks.rank, ranks.world_size)
        self.behind = Control.new("behind", ranks.rank, ranks.world_size)
        self.values = GroupValues(session.optimizers)
        self.saver = Saver(session, self.store, self.control, self.behind, self.values)
        self.token = self.control.broadcast(os.urandom(4).hex())
        self.metrics: dict[str, float] = {}
        self.metrics_step = -1
        self.running: Save | None = None
        self.owed = False
        self.serial = 0
        self._thread: ThreadPoolExecutor | None = None

    def load(self, session: TrainingSession) -> int:
        """Tidy up after dead saves, and restore what the configuration says; the step, 0 for a fresh
        start.
        """
        self._tidy()
        choice = choose(session, self.config, self.store, self.control)
        serials = [saved.manifest.serial for saved in complete(self.store)] if self.control.is_main else []
        self.serial = self.control.broadcast(max(serials, default=0))
        if choice is None:
            return 0
        if choice.own:
            step = resume(session, choice.saved, self.config, self.control)
            session.saved_step = step
        else:
            step = start_from(session, choice.saved, self.config, self.control)
        if self.control.is_main:
            session.log.info("going on after step %d from %s", step, choice.saved.where)
        return step

    def _tidy(self) -> None:
        """Remove what dead saves left behind. Collective.

        Raises:
            RequestError: checkpoints cannot be saved or found where they should lie.
        """
        problem: list[Any] = []
        if self.control.is_main:
            try:
                for name in self.store.clean():
                    self.session.log.info("removed %s, which a save left unfinished", name)
            except CheckpointError as error:
                problem = [isinstance(error, RequestError), error.message, error.hint]
        if problem := self.control.broadcast(problem):
            asked, *words = problem
            raise (RequestError if asked else CheckpointError)(*words)

    def due(self, step: int) -> bool:
        """Whether to save after update `step`. A bad streak puts a save off until the first good update.

        Raises:
            CheckpointError: a save in the background failed.
        """
        self.poll()
        if self.schedule.by_step(step) or (step > 0 and self._by_time()):
            self.owed = True
        return self.owed and self.session.guard.streak == 0

    def _by_time(self) -> bool:
        return self.config.minutes > 0 and bool(self.control.broadcast(self.schedule.by_time()))

    def save(self, session: TrainingSession, step: int, kind: str) -> None:
        """Save the state after update `step`. In mode "async" returns while copying goes on, see `staged`.

        Raises:
            CheckpointError: it could not be written, or the one before it.
        """
        self.wait()
        self.owed = False
        self.schedule.saved()
        self.serial += 1
        save = Save(
            step=step,
            kind=kind,
            serial=self.serial,
            token=self.token,
            milestone=self.schedule.milestone(step),
            metrics=self.metrics if self.metrics_step == step else {},
        )
        behind = self.config.mode == "async"
        self.saver.stage(save, lazily=behind)
        if behind:
            save.done = self._pool().submit(self._write, save, self.behind)
            self.running = save
        else:
            self._completed(save, self._write(save, self.control))

    def staged(self) -> None:
        """Return when parameters and moments may change."""
        self.saver.copier.hold()

    def poll(self) -> None:
        """Take note of a save in the background that has ended on all ranks.

        Raises:
            CheckpointError: it failed.
        """
        running = self.running
        if running is not None and running.done is not None:
            ended = running.done.done()
            if all(self.control.gather(ended)):
                self.wait()

    def wait(self) -> None:
        """Wait for the save in the background, if there is one.

        Raises:
            CheckpointError: it failed.
        """
        running, self.running = self.running, None
        if running is not None and running.done is not None:
            self._completed(running, running.done.result())

    def drain(self) -> None:
        """Wait until every save is durable."""
        self.wait()

    def rollback(self, session: TrainingSession) -> int:
        """Weights, moments and counters of optimizers as in the last good checkpoint; the data goes on."""
        self.staged()
        self.wait()
        saved = newest_whole(self.store, self.config, self.control)
        if saved is None:
            raise CheckpointError(
                "guard.action = rollback, and there is no checkpoint to roll back to",
                "set checkpoint.initial = true, or a smaller checkpoint.interval",
            )
        load_model(session, saved)
        load_optimizers(session, saved, saved.state()["optimizers"])
        session.saved_step = None
        return saved.manifest.step

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take note of an evaluation, for `keep_best`."""
        wanted = self.config.best_metric
        if wanted not in metrics and not self.metrics and self.session.ranks.is_main:
            self.session.log.warning(
                "checkpoint.keep_best keeps none: evaluations give no %s, but %s", wanted, ", ".join(metrics)
            )
        self.metrics = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.metrics_step = step

    def close(self) -> None:
        """Let a save that is under way finish, and end the threads. Nothing is raised: the run ends
        anyway.
        """
        running, self.running = self.running, None
        if running is not None and running.done is not None:
            try:
                self._completed(running, running.done.result())
            except Exception as error:
                self.session.log.error("the checkpoint of step %d failed: %s", running.step, error)
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self.saver.copier.close()
        self.control.close()
        self.behind.close()

    def _write(self, save: Save, control: Control) -> str:
        """Write, rename, then remove what need not be kept; the name."""
        name = self.saver.write(save, control)
        save.durable_at = time.perf_counter()
        if control.is_main and self.config.keep_last:
            self._prune(name)
        return name

    def _completed(self, save: Save, name: str) -> None:
        """After the rename: tell observers."""
        save.name = name
        self.session.emit("checkpoint_durable", save.step, self.store.where(name), save.kind)

    def _prune(self, newest: str) -> None:
        try:
            found = [(saved.name, saved.manifest) for saved in complete(self.store)]
        except CheckpointError as error:  # the new one is there: nothing is lost
            self.session.log.warning("cannot look for old checkpoints: %s", error)
            return
        for name in sorted({name for name, _ in found} - kept(found, self.config, newest)):
            if name == self.store.latest():
                continue
            try:
                self.store.remove(name)
            except (OSError, CheckpointError) as error:
                words = "cannot remove the old checkpoint %s: %s"
                self.session.log.warning(words, self.store.where(name), error)

    def _pool(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "forge-checkpoint-write")
            one_thread_each(self._thread)
        return self._thread


def store_of(session: TrainingSession, config: CheckpointConfig) -> Store:
    """Where the checkpoints of a run lie."""
    if config.url is None:
        return LocalStore(session.run.path / FOLDER)
    if "://" in config.url:
        from forge_ckpt.objects import ObjectStore

        start = config.url if config.url.endswith("://") else config.url.rstrip("/") + "/"
        return ObjectStore(start + session.run.name)
    return LocalStore(user_path(config.url) / session.run.name)
