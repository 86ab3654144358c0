"""A model of a folder in memory, to generate with it or to evaluate it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import torch

from forge_ckpt.errors import CheckpointError, RequestError
from forge_ckpt.gathering import persistent_buffers, saved_parameters
from forge_ckpt.hf.folders import dtype_named
from forge_ckpt.hf.opening import Opened
from forge_ckpt.hf.start import check_model, fill, tensors_of
from forge_ckpt.hf.whole import completed
from forge_core.commands.loading import load
from forge_core.config.tables import ModelConfig
from forge_core.loop.build import new_session
from forge_core.loop.evaluate import evaluate
from forge_core.loop.inference import build_for_inference, for_one_process

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession


@contextmanager
def using(opened: Opened, *, data: bool = False, dtype: str | None = None) -> Iterator[TrainingSession]:
    """A session on this process with the folder's weights in its model, in evaluation mode.

    Args:
        opened: see `open_model`.
        data: with the data of its configuration; otherwise with the tokenizer alone.
        dtype: of the weights in memory; None: as for training.
    """
    opened = completed(opened)
    with ExitStack() as stack:
        session = new_session(for_one_process(opened.config), opened.plugins, stack)
        build_for_inference(session, data=data)
        # those start alike in every run from one seed, which is why they need not be saved
        saved = {**saved_parameters(session), **persistent_buffers(session)}
        unsaved = tensors_of(session.model).keys() - saved.keys() if opened.kind == "checkpoint" else ()
        fill(session.model, opened.weights, opened.where, unknown=opened.unknown, unsaved=unsaved)
        if dtype is not None:
            session.model.to(dtype_named(dtype))
        session.model.eval()
        yield session


@torch.no_grad()
def logits(session: TrainingSession, tokens: torch.Tensor) -> torch.Tensor:
    """Scores of the token behind each token, (B, S, V) on the model's device.

    Args:
        session: of `using`.
        tokens: (B, S) ids, int64; rows start a document at position 0. A model that sees gets text alone.
    """
    model: Any = session.model
    hidden = model(tokens.to(next(model.parameters()).device))
    found: torch.Tensor = model.logits(hidden)
    return found


def generate(
    session: TrainingSession,
    prompts: Sequence[Any],
    *,
    max_new_tokens: int,
    batch_size: int = 8,
    seed: int = 0,
    **sampling: Any,
) -> Iterator[str]:
    """The text that follows each prompt, in order.

    Args:
        session: of `using`. prompts: texts, an empty one starts a new document; or mappings, see `Generator`.
        max_new_tokens: most tokens added to each.
        batch_size: prompts that run together.
        seed: of the sampling.
        sampling: temperature, top_k, top_p.

    Raises:
        CheckpointError: nothing in this configuration generates.
    """
    if session.generator is None:
        raise CheckpointError(f"nothing generates from the model of {session.run.name}")
    random = torch.Generator().manual_seed(seed)
    for start in range(0, len(prompts), batch_size):
        yield from session.generator.generate(
            session,
            prompts[start : start + batch_size],
            max_new_tokens=max_new_tokens,
            generator=random,
            **sampling,
        )


@attrs.frozen
class _SomeSets:
    """Data with a part of its evaluation sets."""

    whole: Any
    evaluation: tuple[Any, ...]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)


def evaluate_sets(session: TrainingSession, sets: Sequence[str] = ()) -> dict[str, float]:
    """Metrics of the evaluation sets of these names, of all by default, and of evaluators.

    Raises:
        CheckpointError: there is no set of a name, or none at all.
    """
    found = {dataset.name: dataset for dataset in session.data.evaluation}
    for name in sets:
        if name not in found:
            raise RequestError(f"no evaluation set is called {name!r}", f"known: {', '.join(found)}")
    if not found and not session.evaluators:
        raise RequestError("there is nothing to evaluate on", "give sets with [[eval.sets]] or data.holdout")
    if sets:
        some: Any = _SomeSets(session.data, tuple(found[name] for name in sets))
        session.data = some
    return evaluate(session)


def with_config(opened: Opened, source: str, flags: Sequence[str]) -> Opened:
    """The same weights under another configuration: other data, other evaluation sets.

    Raises:
        ConfigError: its model is another one.
    """
    config, plugins = load(source, flags)
    check_model(opened, config[ModelConfig])
    return attrs.evolve(opened, config=config, plugins=plugins)
