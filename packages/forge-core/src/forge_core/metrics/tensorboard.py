"""The writer "tensorboard": event files that `tensorboard --logdir runs` shows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.metrics.options import TensorboardOptions
from forge_core.metrics.writers import load_package

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession

FLUSH_SECS = 10


class TensorboardWriter:
    """Scalars as TensorBoard events.

    In a folder that holds events of an earlier start, the first record tells TensorBoard to forget what that
    start wrote from this step on.
    """

    def __init__(self, directory: Path, config: str = "") -> None:
        load_package("tensorboard", "tensorboard")
        module = load_package("tensorboard", "torch.utils.tensorboard")
        self.resumed = any(directory.glob("events.out.tfevents.*"))
        self.events: Any = module.SummaryWriter(str(directory), flush_secs=FLUSH_SECS)
        if config and not self.resumed:
            self.events.add_text("config", f"```toml\n{config}\n```")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add one event per value."""
        if self.resumed:
            self._forget_from(step)
            self.resumed = False
        for name, value in metrics.items():
            self.events.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left and close the file."""
        self.events.close()

    def _forget_from(self, step: int) -> None:
        proto = load_package("tensorboard", "tensorboard.compat.proto.event_pb2")
        log = proto.SessionLog(status=proto.SessionLog.START)
        self.events.file_writer.add_event(proto.Event(session_log=log), step)


def build(session: TrainingSession, options: TensorboardOptions) -> TensorboardWriter:
    """Component target. Raises ForgeError if the package is missing."""
    run = Path(session.run.path)
    config = run / "config.toml"
    text = config.read_text(encoding="utf-8") if config.exists() else ""
    return TensorboardWriter(Path(options.dir) if options.dir else run / "tensorboard", text)
