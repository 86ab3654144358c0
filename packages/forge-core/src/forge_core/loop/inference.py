"""A session to use a model without training it: generation, evaluation, looking at its parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from forge_core.config.config import Config
from forge_core.config.fields import evolve
from forge_core.config.tables import DataConfig, DistributedConfig, ModelConfig, TrainConfig
from forge_core.data.tokenizer import Tokenizer, load_tokenizer
from forge_core.loop.build import Builder, _build_model, evolve_term, select_step_fn

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession

MEMORY_PHASES = ("modify", "materialise", "adapt")


@attrs.frozen
class TokenizerAlone:
    """What stands in for data where none is needed."""

    tokenizer: Tokenizer
    evaluation: tuple[Any, ...] = ()


def for_one_process(config: Config) -> Config:
    """The same model and data on one process, not compiled, with weights that come from elsewhere.

    A plugin's table that has sizes of mesh axes says what is left of it on one process: `for_one_process()`.
    """
    others = {
        name: table.for_one_process()
        for name, table in config.tables.items()
        if hasattr(table, "for_one_process")
    }
    return config.replace(
        **others,
        model=evolve(config[ModelConfig], init_from=None),
        distributed=DistributedConfig(),
        train=evolve(config[TrainConfig], compile=False),
    )


def build_for_inference(
    session: TrainingSession, *, data: bool = False, memory: bool = True
) -> TrainingSession:
    """Build the model, its forward, the step function (which evaluates), evaluators and generator.

    There is no optimizer, no checkpointer and no metrics. Weights have their initial values; the caller fills
    them in.

    Args:
        session: of `new_session`, with a configuration of `for_one_process`.
        data: build the data, too; otherwise `session.data` has the tokenizer alone.
        memory: False leaves the model on the meta device, to look at names and shapes, and builds no more.
    """
    builder = Builder(session)
    if data:
        session.data = session.exit_stack.enter_context(builder.one("forge_build_data"))
    elif memory:
        table = session.config[DataConfig]
        alone: Any = TokenizerAlone(load_tokenizer(table.tokenizer, table.eos_token))
        session.data = alone
    _build_model(builder, MEMORY_PHASES if memory else ("modify",))
    if memory:
        terms = builder.many("forge_extra_losses", model=session.model)
        session.loss_terms = tuple(evolve_term(c) for c in terms)
        session.forward = builder.one("forge_build_forward", model=session.model)
        session.step_fn = select_step_fn(builder)
        session.evaluators = dict(c.value for c in builder.many("forge_evaluators"))
        session.generator = builder.optional("forge_build_generator")
    return session
