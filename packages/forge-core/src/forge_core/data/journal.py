"""Where the data of a run stood each time it was started, kept in its folder as `data.jsonl`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_core.config.config import Config
from forge_core.config.shape import plain
from forge_core.config.tables import DataConfig, EvalConfig, TrainConfig
from forge_core.errors import DataError, ForgeError
from forge_core.files import replace_file

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession

NAME = "data.jsonl"
_READING = ("num_workers", "prefetch", "allow_changed", "cache_dir")
"""Keys of [data] that change no sample."""


def note_start(session: TrainingSession, step: int) -> None:
    """Add a line for a start after update `step`: the position, the split over ranks, and what the samples
    depend on. Only for data of the core."""
    from forge_core.data.stream import SampleStream

    stream = getattr(session.data, "train", None)
    if not isinstance(stream, SampleStream):
        return
    line = {
        "step": step,
        "data_ranks": session.ranks.data_size,
        "batch_size": session.config[TrainConfig].batch_size,
        "config": digest(session.config),
        "state": stream.state_dict(),
    }
    path = session.run.path / NAME
    try:
        before = path.read_bytes() if path.exists() else b""
        # as a whole: half a line would make those of all starts unreadable
        replace_file(path, before + json.dumps(line).encode() + b"\n")
    except OSError as error:
        raise ForgeError(
            f"cannot write {path}: {error.strerror}", "free some space, or set run.dir"
        ) from error


def find_start(folder: Path, step: int) -> Mapping[str, Any]:
    """The line of the last start before update `step`.

    Raises:
        DataError: the run kept none.
    """
    path = folder / NAME
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} holds no {NAME}", "it is written where a run is trained by forge"
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    starts = [line for line in lines if line["step"] < step]
    if not starts:
        raise DataError(f"{folder}: no start of the run lies before update {step}")
    found: Mapping[str, Any] = starts[-1]
    return found


def digest(config: Config) -> str:
    """Changes when a key does that samples or their order depend on."""
    data = {name: value for name, value in plain(config[DataConfig]).items() if name not in _READING}
    options = [
        plain(config.options(path, name))
        for path, name in chosen_sources(config)
        if config.options(path, name) is not None
    ]
    train = config[TrainConfig]
    parts = [data, options, bool(config[EvalConfig].sets), train.seq_len, train.seed]
    text = json.dumps(parts, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def chosen_sources(config: Config) -> list[tuple[str, str]]:
    """(table, component) of each source that is trained on."""
    data = config[DataConfig]
    if not data.mix:
        return [("data", data.source)]
    return [(f"data.mix.{i}", each.source) for i, each in enumerate(data.mix)]
