"""Runs on several ranks that save and go on. Its functions run in the workers of a pool."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ckptkit import KilledError, Killer, plugins_for, run
from torch import Tensor

from forge_core.contract import Component, Transform
from forge_core.contract.runtime import Observer


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor on every rank."""
    value: Any = tensor.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


class AtBegin(Observer):
    """Weights and moments as they are before the first update of this start."""

    def train_begin(self, session: Any) -> None:
        names = {id(p): name for name, p in session.freeze.named.items()}
        self.step = session.step
        self.values = {f"model/{name}": whole(p) for name, p in session.freeze.named.items()}
        for name, named in session.optimizers.items():
            for parameter, state in named.optimizer.state.items():
                for key, value in state.items():
                    self.values[f"optimizer/{name}/{names[id(parameter)]}/{key}"] = whole(value)


def tables(layout: dict[str, Any], rows: int, **more: Any) -> dict[str, Any]:
    """8 sequences an update, whatever the layout; a model that 4 ranks can share."""
    return {
        "distributed": layout,
        "train": {"batch_size": rows, "dtype": "fp64"},
        "model": {"dim": 16, "n_heads": 4, "n_kv_heads": 4, "ffn_hidden_dim": 32},
        "scheduler": {"name": "constant"},
        **more,
    }


def go(
    folder: str, layout: dict[str, Any], rows: int, steps: int, kill: int, table: dict[str, Any]
) -> list[Any]:
    """Train to `steps`, or die after update `kill` (0: do not): losses, weights at the end, state at
    begin.
    """
    begin = AtBegin()
    plugins = plugins_for(hooks={"observers": [begin, *([Killer(kill)] if kill else [])]})
    more = dict(table)
    optimizer = more.pop("optimizer", "adamw")
    named = tables(layout, rows, optimizer={"name": optimizer, "lr": 1e-2})
    named["train"]["max_steps"] = steps
    try:
        done = run(Path(folder), plugins=plugins, steps=steps, checkpoint=more, **named)
    except KilledError:
        return [begin.step, [], {}, begin.values]
    weights = {name: whole(p) for name, p in done.session.freeze.named.items()}
    return [begin.step, done.losses, weights, begin.values]


def blind(folder: str) -> list[Any]:
    """Rank 1 sees no files at all, as with a stale cache; the step that each rank resumes from."""
    from forge_ckpt.store import LocalStore

    real = LocalStore.names
    if os.environ["RANK"] == "1":
        LocalStore.names = lambda self: []  # type: ignore[method-assign]
    try:
        return [go(folder, {}, 4, 5, 0, {})[0]]
    finally:
        LocalStore.names = real  # type: ignore[method-assign]


def late_commit(folder: str, mode: str) -> float:
    """Rank 0 commits a second late; seconds that the save of one step takes this rank, until durable."""
    import forge_ckpt.checkpointer as module
    from forge_ckpt.store import LocalStore

    real, save = LocalStore.commit, module.RunCheckpointer.save
    seconds: list[float] = []

    def commit(self: Any, *arguments: Any) -> str:
        time.sleep(1.0)
        return real(self, *arguments)

    def timed(self: Any, *arguments: Any) -> None:
        began = time.monotonic()
        save(self, *arguments)
        self.drain()
        seconds.append(time.monotonic() - began)

    LocalStore.commit, module.RunCheckpointer.save = commit, timed  # type: ignore[method-assign]
    try:
        go(folder, {}, 4, 1, 0, {"mode": mode})
    finally:
        LocalStore.commit, module.RunCheckpointer.save = real, save  # type: ignore[method-assign]
    return seconds[0]


def failing(folder: str, mode: str) -> list[Any]:
    """The disk of rank 1 is full at step 2: the error on every rank, and what is left."""
    import forge_ckpt.store as module
    from forge_core.errors import ForgeError

    real = module.write_file

    def write(path: Path, parts: Any) -> Any:
        if "step_00000002" in str(path) and "00001.safetensors" in path.name:
            raise OSError(28, "No space left on device")
        return real(path, parts)

    module.write_file = write
    try:
        go(folder, {}, 4, 6, 0, {"mode": mode})
    except ForgeError as error:
        time.sleep(0.5)
        return [str(error), sorted(p.name for p in (Path(folder) / "a/checkpoints").iterdir())]
    finally:
        module.write_file = real
    return ["none", []]


def failing_on_one(folder: str, rank: int, what: str, mode: str) -> str:
    """A part of the save of step 2 fails on one rank alone: the error on this rank."""
    import forge_ckpt.saving as module
    from forge_core.errors import ForgeError

    real = getattr(module.Saver, what)

    def fails(self: Any, save: Any, *arguments: Any, **named: Any) -> Any:
        if save.step == 2 and os.environ["RANK"] == str(rank):
            raise MemoryError("no room")
        return real(self, save, *arguments, **named)

    setattr(module.Saver, what, fails)
    try:
        go(folder, {}, 4, 6, 0, {"mode": mode})
    except ForgeError as error:
        return str(error)
    finally:
        setattr(module.Saver, what, real)
    return "none"


def random_numbers(folder: str) -> list[Any]:
    """What torch draws on this rank in the two updates after a resume, or in a run that goes on."""

    class Draw(Observer):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def step_end(self, session: Any, step: int, result: Any) -> None:
            self.seen.append(float(torch.rand(())))

    def start(kill: int) -> list[float]:
        draw = Draw()
        observers: list[Observer] = [draw, *([Killer(kill)] if kill else [])]
        try:
            run(
                Path(folder),
                plugins=plugins_for(hooks={"observers": observers}),
                steps=4,
                **tables({}, 4),
            )
        except KilledError:
            return draw.seen
        return draw.seen

    first = start(3)  # the last save is after 2
    return [first, start(0)]


def dropped(folder: str, layout: dict[str, Any], rows: int, kill: int) -> list[Any]:
    """Where the first block has left its input as it was, dropped in both branches, at each of four updates;
    and the losses.
    """
    seen: list[Tensor] = []

    def look(module: Any, inputs: Any, output: Any) -> None:
        if module.training:
            seen.append((output == inputs[0]).detach().clone())

    def apply(model: Any) -> Any:
        next(iter(model.layers.values())).register_forward_hook(look)
        return model

    transform = Transform(phase="adapt", name="look", apply=apply)
    hooks: dict[str, Any] = {"forge_model_transforms": lambda: [transform]}
    if kill:
        hooks["observers"] = [Killer(kill)]
    named = tables(layout, rows)
    named["model"]["dropout"] = 0.5
    try:
        done = run(Path(folder), plugins=plugins_for(hooks=hooks), steps=4, **named)
    except KilledError:
        return [seen, []]
    return [seen, done.losses]


def apart(folder: str) -> str:
    """Each rank has a disk of its own under the same path: the error."""
    import forge_ckpt.checkpointer as module
    from forge_ckpt.store import LocalStore
    from forge_core.errors import ForgeError

    real = module.store_of
    module.store_of = lambda *_: LocalStore(Path(folder) / f"disk{os.environ['RANK']}")
    try:
        go(folder, {}, 4, 2, 0, {})
    except ForgeError as error:
        return str(error)
    finally:
        module.store_of = real
    return "none"


class Ids:
    """Every token of sample i is `first` + i."""

    def __init__(self, count: int, first: int = 0, length: int = 8) -> None:
        self.count, self.first, self.length = count, first, length
        self.fingerprint, self.max_token = f"ids {first} {count}", first + count - 1

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        return row_of(self.first + index, self.length)


class FlowOfIds:
    """The same as a stream, each epoch in an order of its own."""

    unrepeatable = ""

    def __init__(self, count: int, length: int = 8) -> None:
        self.count, self.length = count, length
        self.fingerprint, self.max_token = f"flow of ids {count}", count - 1

    def epoch(self, number: int, part: int = 0, parts: int = 1) -> Iterator[dict[str, Any]]:
        for value in np.random.default_rng(number).permutation(self.count).tolist():
            if value % parts == part:
                yield row_of(value, self.length)

    def at(self, position: int, part: int = 0, parts: int = 1) -> Iterator[dict[str, Any]]:
        endless = itertools.chain.from_iterable(self.epoch(n, part, parts) for n in itertools.count())
        return itertools.islice(endless, position, None)

    def once(self) -> Iterator[dict[str, Any]]:
        return self.epoch(0)

    def close(self) -> None:
        pass


def row_of(value: int, length: int) -> dict[str, Any]:
    row = np.full(length, value)
    return {"tokens": row, "targets": row, "positions": np.arange(length)}


def ids32(spec: Any, options: object) -> Ids:
    return Ids(32)


def ids40(spec: Any, options: object) -> Ids:
    return Ids(40)


def flow40(spec: Any, options: object) -> FlowOfIds:
    return FlowOfIds(40)


def low(spec: Any, options: object) -> Ids:
    return Ids(100)


def high(spec: Any, options: object) -> Ids:
    return Ids(100, 1000)


SOURCES = ("ids32", "ids40", "flow40", "low", "high")


class SeenIds(Observer):
    """The ids of every finished update on this rank; after update `pause` time for workers to read ahead."""

    def __init__(self, pause: int = 0) -> None:
        self.updates: list[list[int]] = []
        self.pause = pause

    def train_begin(self, session: Any) -> None:
        take = session.stream.take

        def recorded(count: int) -> Any:
            batches = take(count)
            self.taken = [int(i) for batch in batches for i in batch["tokens"][:, 0]]
            return batches

        session.stream.take = recorded

    def step_end(self, session: Any, step: int, result: Any) -> None:
        self.updates.append(self.taken)
        if step == self.pause:
            time.sleep(0.5)


def ids_of(
    folder: str, data: dict[str, Any], layout: dict[str, Any], rows: int, steps: int, kill: int, **more: Any
) -> list[list[int]]:
    """Train on samples that carry their numbers, to `steps` or until it dies after update `kill`; the ids of
    each update on this rank.
    """
    seen = SeenIds(pause=kill - 1)
    parts = [Component(category="data_source", name=n, target=f"rankskit:{n}") for n in SOURCES]
    observers: list[Observer] = [seen, *([Killer(kill)] if kill else [])]
    plugins = plugins_for(hooks={"observers": observers, "forge_components": parts})
    named: dict[str, Any] = {
        "distributed": layout,
        "data": {"holdout": 0.0, **data},
        "train": {"batch_size": rows, "seq_len": 8, "seed": more.pop("seed", 1)},
        "model": {"vocab_size": 1100},
        "eval": {"at_end": False},
        "scheduler": {"name": "constant"},
    }
    with suppress(KilledError):
        run(Path(folder), plugins=plugins, steps=steps, **named, **more)
    return seen.updates


def keys_of(folder: str, layout: dict[str, Any]) -> list[str]:
    """Names in the index of a checkpoint that this layout saved."""
    from forge_ckpt import open_checkpoint

    go(folder, layout, 4, 1, 0, {})
    return sorted(open_checkpoint(Path(folder) / "a").index.tensors)
