"""Evaluation: sums over tokens, each sample once, and nothing about training changed afterwards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from forge_core.config.tables import EvalConfig
from forge_core.optim import optimizer_mode

if TYPE_CHECKING:
    from torch import nn

    from forge_core.loop.session import TrainingSession


@contextmanager
def evaluating(session: TrainingSession) -> Iterator[None]:
    """Evaluation mode, averaged weights where the optimizer keeps them, no gradients.

    Each module's mode and the random state are what they were afterwards, also after an exception.
    """
    modes: dict[nn.Module, bool] = {m: m.training for m in session.model.modules()}
    random_state = torch.get_rng_state()
    device_state = torch.cuda.get_rng_state(session.device) if session.device.type == "cuda" else None
    optimizers = [named.optimizer for named in session.optimizers.values()]
    try:
        for optimizer in optimizers:
            optimizer_mode(optimizer, "eval")
        session.model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        if session.control is not None:
            drop_whole_weights(session.model)
        for optimizer in optimizers:
            optimizer_mode(optimizer, "train")
        torch.set_rng_state(random_state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state, session.device)


def drop_whole_weights(model: nn.Module) -> None:
    """Forget the weights that a forward without a backward has gathered: they are about to change."""
    from forge_core.parallel.sync import reshard  # slow to import, and one process needs none

    reshard(model)


def evaluate(session: TrainingSession) -> dict[str, float]:
    """Loss of every evaluation set and what evaluators add: `eval/loss`, `eval/perplexity`,
    `eval/<set>/loss`.

    `eval/loss` is the token mean over all sets. An evaluation cut short by a signal gives an empty dict.
    """
    metrics: dict[str, float] = {}
    sums = {"loss_sum": 0.0, "tokens": 0.0}
    named = bool(session.config[EvalConfig].sets) or len(session.data.evaluation) > 1
    with evaluating(session):
        for dataset in session.data.evaluation:
            result = session.step_fn.evaluate(session, dataset)
            if session.stop:  # as all ranks found during that set
                return {}
            if named and result["tokens"]:
                metrics[f"eval/{dataset.name}/loss"] = result["loss_sum"] / result["tokens"]
            for name in sums:
                sums[name] += result[name]
        if sums["tokens"]:
            loss = sums["loss_sum"] / sums["tokens"]
            metrics["eval/loss"] = loss
            metrics["eval/perplexity"] = math.exp(min(loss, 700.0))
        for name, evaluator in session.evaluators.items():
            for key, value in evaluator(session).items():
                metrics["/".join(filter(None, ("eval", name, key)))] = float(value)
    session.emit("eval_end", session.step, metrics)
    return metrics
