"""Copies of what is saved, in buffers that are laid out like the files and used again for every save."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, cast

import torch
from torch import Tensor

from forge_ckpt.files import BLOCK
from forge_ckpt.tensorfile import lay_out, place

cuda: Any = torch.cuda


class StagedFile:
    """One file in memory: `buffer` (n,) uint8 holds its bytes, `views` the places of its tensors by key.

    Args:
        tensors: what goes in, by key; only dtypes and shapes are looked at.
        pin: page-locked memory, which an accelerator copies to without the host waiting.
        about: goes into the file's header.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], *, pin: bool = False, about: Mapping[str, str] | None = None
    ) -> None:
        layout = lay_out(((key, t.dtype, t.shape) for key, t in tensors.items()), about)
        room = torch.empty(layout.size + BLOCK, dtype=torch.uint8, pin_memory=pin)
        begin = -room.data_ptr() % BLOCK  # a direct write takes memory from such an address
        self.buffer = room[begin : begin + layout.size]
        self.views = place(layout, self.buffer)

    @property
    def data(self) -> memoryview:
        """The file's bytes."""
        return memoryview(cast(Any, self.buffer.numpy()))

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether these have the keys, dtypes and shapes of what was laid out."""
        return self.views.keys() == tensors.keys() and all(
            view.dtype == tensors[key].dtype and view.shape == tensors[key].shape
            for key, view in self.views.items()
        )

    def copies(self, tensors: Mapping[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """(places, sources): what is copied where."""
        return [self.views[key] for key in tensors], list(tensors.values())


class Copier:
    """Copies to staging buffers while the next forward and backward run.

    On an accelerator the copies go to a stream of their own, and `hold` makes the current stream wait for
    them: the host never waits. On a CPU a thread copies, with one core.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._stream: Any = cuda.Stream(device) if device.type == "cuda" else None
        self._event: Any = None

    @torch.no_grad()
    def copy(self, places: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy now; the copies are there when this returns."""
        if places:
            torch._foreach_copy_(list(places), list(sources))

    def start(self, places: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Begin to copy; what `sources` hold may not change until `hold` has returned."""
        if not places:
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream), torch.no_grad():
                for target, source in zip(places, sources, strict=True):
                    target.copy_(source, non_blocking=True)
                    source.record_stream(self._stream)
            self._event = cuda.Event()
            self._event.record(self._stream)
            return
        self._running = self._pool().submit(self.copy, places, sources)

    def hold(self) -> None:
        """Return when the sources may change."""
        if self._event is not None:
            torch.cuda.current_stream(self.device).wait_event(self._event)
        if self._running is not None:  # stays: the thread that writes waits for it, too
            self._running.result()

    def finished(self) -> None:
        """Wait, in any thread, until the copies are in host memory."""
        running, event = self._running, self._event
        if running is not None:
            running.result()
        if event is not None:
            event.synchronize()

    def close(self) -> None:
        """End the thread."""
        self._running = None
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def _pool(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "forge-checkpoint-copy")
            one_thread_each(self._thread)
        return self._thread


def one_thread_each(pool: ThreadPoolExecutor) -> None:
    """Make the thread of a pool copy with one core, and leave all other threads as they were.

    torch keeps the number of cores for each thread that asked; the call that sets it also sets what new
    threads begin with, hence the second call from here.
    """
    cores = torch.get_num_threads()
    done = threading.Event()

    def limit() -> None:
        torch.set_num_threads(1)
        torch.zeros(1 << 16).add_(1)
        done.set()

    pool.submit(limit)
    done.wait()
    torch.set_num_threads(cores)
