"""What a run would be, found out by building it without giving its weights memory."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from forge_core.config import Config
from forge_core.config.tables import MetricsConfig, SchedulerConfig, TrainConfig
from forge_core.data.wording import counted
from forge_core.distributed.layout import needed_processes
from forge_core.loop.build import build_session, new_session
from forge_core.loop.flops import flops_of
from forge_core.loop.ranks import Ranks
from forge_core.plugins import Plugins
from forge_core.version import __version__

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession


def explain(config: Config, plugins: Plugins, world_size: int | None = None) -> dict[str, Any]:
    """Everything that `forge explain` prints, as plain data.

    Without a world size it is that of the fewest processes that the mesh can run on. Bytes and counts are of
    the whole model, before any sharding. The data is opened (an error in it is one
    here, too); nothing is written.
    """
    quiet = config.replace(metrics=_evolve(config[MetricsConfig], progress="off"))
    plugins.activate(config.plugins)
    if world_size is None:
        world_size = needed_processes([c.value for c in plugins.collect("forge_mesh_axes", config=config)])
    with ExitStack() as stack, torch.random.fork_rng(devices=[]):
        stack.enter_context(quietly())
        ranks = Ranks(world_size=world_size)
        session = build_session(new_session(quiet, plugins, stack, ranks=ranks), dry=True)
        session.freeze.apply(1)
        return {
            "plugins": [{"name": "core", "version": __version__}]
            + [{"name": p.name, "version": p.version} for _, p in sorted(plugins.loaded.items())],
            "world_size": world_size,
            "mesh": [
                {"name": a.name, "size": a.size, "carved_from": a.carved_from} for a in session.mesh_axes
            ],
            "fingerprint": session.plan.fingerprint,
            "plan": [{"hook": e.hook, "plugin": e.plugin, "what": e.what} for e in session.plan.entries],
            "model": _model(session),
            "memory": _memory(session),
            "step": _step(session),
            "schedule": _schedule(session),
            "data": _data(session),
            "more": _more(session),
        }


def _more(session: TrainingSession) -> list[dict[str, Any]]:
    """What plugins say of their own, by heading."""
    answers = session.plugins.collect("forge_explanations", session=session)
    return [{"plugin": c.plugin, "heading": c.value[0], "lines": list(c.value[1])} for c in answers]


@contextmanager
def quietly() -> Iterator[None]:
    """No warnings about what would cost time in a run: this is none, and its weights are nowhere."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _evolve(table: Any, **changes: Any) -> Any:
    return attrs.evolve(table, **changes)


def _model(session: TrainingSession) -> dict[str, Any]:
    """Parameters in all, how many ever train, and how many each alias stands for."""
    freeze = session.freeze
    return {
        "parameters": _numel(freeze.named.values()),
        "trainable": _numel(freeze.ever_trainable().values()),
        "aliases": [
            {
                "name": name,
                "parameters": _numel(freeze.named[match] for match in matches),
                "frozen": bool(matches) and not any(freeze.named[match].requires_grad for match in matches),
            }
            for name in freeze.aliases
            for matches in [freeze.match(name)]
        ],
    }


def _numel(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _memory(session: TrainingSession) -> dict[str, int]:
    """Bytes of weights, gradients (in the weights' precision), optimizer state and auxiliary models."""
    doubled = 2 if session.param_dtype is torch.float64 else 1  # the model was built in fp32
    state = [named.optimizer.state for named in session.optimizers.values()]
    found = {
        "weights": _nbytes(session.freeze.named.values()),
        "gradients": _nbytes(session.freeze.ever_trainable().values()),
        "optimizer": sum(_nbytes(_tensors(list(tensors.values()))) for tensors in state),
        "auxiliary": sum(_module_bytes(module) for module in session.auxiliary_models.values()),
    }
    found = {name: number * doubled for name, number in found.items()}
    return {**found, "total": sum(found.values())}


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _module_bytes(module: nn.Module) -> int:
    return _nbytes([*module.parameters(), *module.buffers()])


def _tensors(value: Any) -> Iterable[Tensor]:
    """Tensors anywhere in a tree of mappings and lists."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)


def _step(session: TrainingSession) -> dict[str, Any]:
    train = session.config[TrainConfig]
    tokens = train.batch_size * train.seq_len * session.grad_accum_steps * session.ranks.data_size
    told = flops_of(session)
    flops = None if told is None else told.expected
    return {
        "batch_size": train.batch_size,
        "seq_len": train.seq_len,
        "grad_accum_steps": session.grad_accum_steps,
        "data_ranks": session.ranks.data_size,
        "tokens": tokens,
        "max_steps": train.max_steps,
        "flops_per_token": flops,
        "flops": None if flops is None else flops * tokens,
        "total_flops": None if flops is None else flops * tokens * train.max_steps,
    }


def _schedule(session: TrainingSession) -> dict[str, dict[int, float]]:
    """Learning rate of each optimizer's first group at a few updates."""
    last = session.max_steps
    warm = min(max(1, session.config[SchedulerConfig].warmup_steps), last)
    marks = sorted({1, warm, *(max(1, last * share // 100) for share in (25, 50, 75)), last})
    return {
        name: {n: named.optimizer.param_groups[0]["initial_lr"] * named.schedule(n) for n in marks}
        for name, named in session.optimizers.items()
        if named.optimizer.param_groups
    }


def _data(session: TrainingSession) -> dict[str, Any]:
    train = session.config[TrainConfig]
    window = train.batch_size * session.grad_accum_steps * session.ranks.data_size
    sources = _sources(session.data.train, train.max_steps * window)
    sizes = [source["samples"] for source in sources]
    samples = sum(sizes) if sizes and None not in sizes else None
    sets = [data_set.name for data_set in session.data.evaluation]
    words = type(session.data).__name__
    epochs = None
    if samples:
        epochs = train.max_steps * window / samples
        what = f"{counted(samples, 'sample')} of {train.seq_len} tokens to train on"
        words = f"{what}, the run sees {_epochs(epochs)}"
    if len(sources) > 1:
        words += "; of each source: " + ", ".join(_source_words(source) for source in sources)
    words += f"; evaluated on {', '.join(sets)}" if sets else "; no evaluation set"
    return {"samples": samples, "epochs": epochs, "sources": sources, "evaluation": sets, "summary": words}


def _sources(stream: Any, position: int) -> list[dict[str, Any]]:
    """Samples, draws and epochs of each source up to a position, where the stream is the core's."""
    order = getattr(stream, "order", None)
    if order is None:
        return []
    drawn = order.drawn(position if order.end is None else min(position, order.end))
    found = []
    for name, source in zip(order.names, stream.sources, strict=True):
        samples = len(source) if hasattr(source, "__len__") else None
        epochs = drawn[name] / samples if samples else None
        found.append({"name": name, "samples": samples, "drawn": drawn[name], "epochs": epochs})
    return found


def _source_words(source: dict[str, Any]) -> str:
    passes = "a stream" if source["epochs"] is None else _epochs(source["epochs"])
    return f"{source['name']} {counted(source['drawn'], 'draw')} ({passes})"


def _epochs(number: float) -> str:
    text = f"{number:.3g}"
    return f"{text} epoch{'' if text == '1' else 's'}"
