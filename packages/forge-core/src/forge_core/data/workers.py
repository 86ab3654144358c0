"""Processes that read the micro-batches of coming steps, through torch's DataLoader."""

from __future__ import annotations

import atexit
import copy
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from types import FrameType
from typing import Any

import attrs
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from forge_core.contract import Batch
from forge_core.data.collate import to_batch, to_micro_batches
from forge_core.data.order import SampleOrder, Start
from forge_core.data.reading import RowReader, Window
from forge_core.errors import ForgeError, LostProcessError
from forge_core.loop.seeds import seed_generators, worker_seed

QUIET = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
"""Signals that a scheduler or a terminal sends to all processes; what to do is up to the training process."""

PR_SET_PDEATHSIG = 1
"""Linux: the signal that a process gets when the thread that made it ends (prctl(2))."""


@attrs.frozen
class Refusal:
    """An error of a worker, on its way to the training process, and the traceback there."""

    error: Exception
    trace: str

    def told(self) -> Exception:
        """The same error, as it would be without workers."""
        self.error.add_note(f"in a process that reads data:\n{self.trace}")
        return self.error


def portable(error: Exception) -> Exception:
    """The error, or where another process could not put it together again one with its words and status."""
    try:
        ForkingPickler.dumps(error)
        again = copy.copy(error)  # made of the class and its arguments, as over there
        if type(again) is type(error) and str(again) == str(error):
            return error
    except Exception:  # whatever the class of a plugin does when it is made of its arguments
        pass
    if not isinstance(error, ForgeError):
        return RuntimeError(f"{type(error).__name__}: {error}")
    plain = ForgeError(error.message, error.hint)
    plain.exit_status = error.exit_status
    return plain


class Windows(Sampler[Any]):
    """The steps from a window on, one after another.

    Each comes with where the order starts, as workers keep a copy of the order.
    """

    def __init__(self, start: Start) -> None:
        self.first: Window = (0, 1)
        self.step = 1
        self.start = start

    def __iter__(self) -> Iterator[tuple[Window, Start]]:
        position, count = self.first
        start = self.start
        while True:
            yield (position, count), start
            position += self.step


class WindowDataset(Dataset[Any]):
    """Reads windows inside a worker."""

    def __init__(self, rows: RowReader) -> None:
        self.rows = rows

    def __getitem__(self, item: tuple[Window, Start]) -> Batch | Refusal:
        window, start = item
        try:
            if start != self.rows.order.start:
                self.rows.order = self.rows.order.rebased(start)
            seed_generators(self.seed(window[0]))
            return to_batch(self.rows.read(window))
        except Exception as error:
            # torch would send a page of text, and a RuntimeError would look like a worker that is gone
            return Refusal(portable(error), traceback.format_exc())

    def seed(self, position: int) -> int:
        """Seed of a step's reading. The position stands for the worker: which of them reads a step must not
        matter, nor whether the run was interrupted."""
        order = self.rows.order
        epoch = position // order.epoch_size if order.epoch_size else 0
        return worker_seed(order.seed, epoch, self.rows.data_rank, position)


class WorkerReader:
    """A `StepReader` whose steps are read by processes, each a whole step of this rank at a time.

    Workers start with the first step that is asked for and read on from there, in the order of steps. They
    are forked, so that sources are neither copied nor opened again; they end with `close`, at the end of the
    process, and within seconds if it is killed.

    Args:
        rows: the reader.
        workers: processes, at least 1.
        ahead: steps that each reads ahead.
        pin: page-locked memory.
    """

    def __init__(self, rows: RowReader, *, workers: int, ahead: int, pin: bool) -> None:
        self._batch_size, self._window_size = rows.batch_size, rows.batch_size * rows.data_size
        self._windows = Windows(rows.order.start)
        self._pin = pin
        self._closing = multiprocessing.RawValue("b", 0)
        self._start = WorkerStart(self._closing)
        # a generator of its own: the loader draws from the global one, and dropout would change with it
        self._loader: DataLoader[Any] | None = DataLoader(
            WindowDataset(rows),
            batch_size=None,
            sampler=self._windows,
            num_workers=workers,
            prefetch_factor=ahead,
            persistent_workers=True,
            pin_memory=pin,
            collate_fn=_unchanged,
            worker_init_fn=self._start,
            multiprocessing_context=multiprocessing.get_context("fork" if hasattr(os, "fork") else None),
            generator=torch.Generator(),
        )
        self._steps: Iterator[Any] | None = None
        self._expected: Window | None = None
        # registered after multiprocessing's own, so that it runs before that waits for the workers
        self._exit = weakref.finalize(self, _announce_end, self._closing)
        atexit.register(self._exit)

    def take(self, window: Window, following: Window) -> list[Batch]:
        if self._loader is None:
            raise RuntimeError("the stream is closed")
        if self._steps is None or window != self._expected:
            self._windows.first, self._windows.step = window, window[1] * self._window_size
            self._start.by_main_thread = threading.current_thread() is threading.main_thread()
            self._steps = iter(self._loader)
        self._expected = following
        found = self._next()
        if isinstance(found, Refusal):
            self._steps = None
            raise found.told()
        if self._pin:
            starts = range(0, len(found["sources"]), self._batch_size)
            return [{k: v[at : at + self._batch_size] for k, v in found.items()} for at in starts]
        return to_micro_batches({k: v.numpy() for k, v in found.items()}, self._batch_size)

    def _next(self) -> Any:
        assert self._steps is not None
        try:
            return next(self._steps)
        except (RuntimeError, OSError, EOFError) as error:
            # torch's for a worker that is gone, and what its sockets say until the system calls it gone
            self._steps = None
            raise LostProcessError(
                f"a process that reads data has ended: {error}",
                "the system ends processes when memory runs out; fewer data.num_workers need less",
            ) from error

    def reset(self, order: SampleOrder) -> None:
        self._windows.start = order.start
        self._steps = None

    def close(self) -> None:
        self._exit()
        self._steps = self._loader = None


class WorkerStart:
    """Run in a worker before it reads: signals are left to the training process, and the worker ends with it.

    A worker that ended on the scheduler's SIGTERM would take the last save with it. One that outlived the
    training process would keep its connections open, and the other ranks would not notice at once.

    Attributes:
        by_main_thread: whether the thread that starts the workers lives as long as its process.
    """

    def __init__(self, closing: Any) -> None:
        self._closing, self._parent = closing, os.getpid()
        self.by_main_thread = False

    def __call__(self, worker: int) -> None:
        for number in QUIET:
            signal.signal(number, self._handle)
        if sys.platform == "linux" and self.by_main_thread:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != self._parent:
                os._exit(0)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM and (self._closing.value or os.getppid() != self._parent):
            os._exit(0)


def _unchanged(batch: Any) -> Any:
    return batch


def _announce_end(closing: Any) -> None:
    """From now on SIGTERM ends the workers."""
    closing.value = 1
