"""Every hook of Forge, in the order of a run.

Hooks are called once, while a run is built; what they return runs in the loop. `forge_build_*` has exactly
one answer: None declines, the core's own answer counts only if nobody else answers, two answers are an error
that `[run.choose]` settles. Plural hooks have any number of answers; they are ordered core first, then by
plugin name. An implementation may take fewer arguments than its specification.
"""

# mypy: disable-error-code="empty-body"
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from forge_core.markers import hookspec

if TYPE_CHECKING:
    from torch import nn

    from forge_core.config.config import Config
    from forge_core.contract import (
        Alias,
        Architecture,
        Checkpointer,
        CheckpointExtra,
        Component,
        DataPipeline,
        Evaluator,
        Flops,
        Forward,
        Generator,
        InitialWeights,
        LayerInfo,
        LossTerm,
        MeshAxis,
        Metric,
        NamedOptimizer,
        Observer,
        StepFn,
        Transform,
    )
    from forge_core.errors import Problem
    from forge_core.loop.session import TrainingSession


# Configuration (no torch may be imported here)
# ------------------------------------------------------------------


@hookspec
def forge_tables() -> type | None:
    """The attrs class of the plugin's table, made with `forge_core.config.table`.

    Called when the plugin's table appears in a configuration, or for `forge config reference`. The table's
    name is the plugin's. None: the table takes no keys.
    """


@hookspec
def forge_components() -> Iterable[Component]:
    """The named parts that the plugin offers, by category; users pick them as `plugin/name`.

    Called when the plugin is loaded. An empty list: none.
    """


@hookspec
def forge_problems(config: Config, world_size: int, axes: Sequence[MeshAxis]) -> Iterable[Problem]:
    """What does not go together in this configuration, in words; all problems are reported at once.

    Called after every table is structured and resolved, with the number of ranks and all plugins' axes of
    the mesh, every size known; no axes where they do not fit the ranks, which is reported already. Raise
    nothing for what a user can mend: return a `Problem` with the dotted path (`at_start` for what is missing
    on this machine).
    """


@hookspec
def forge_mesh_axes(config: Config) -> Iterable[MeshAxis]:
    """Dimensions of the device mesh. Called before ranks are set up; axes of size 1 are left out."""


@hookspec
def forge_flops(config: Config, trains: Callable[[str], bool]) -> float | Flops | None:
    """FLOPs of one token, forward and backward, of the modules the plugin adds; summed over plugins for MFU.

    What not every token has is told by the piece (`Flops`), and counted as it comes. `trains(name)` says
    whether any parameter of an alias or a pattern trains now; the hook is called again when that changes.
    None: the plugin adds nothing. A plugin that replaces modules counted by another returns the difference.
    """


@hookspec
def forge_architectures() -> Mapping[str, Architecture]:
    """Hugging Face `model_type` -> how its configuration and tensors map to ours, both ways.

    Called by import and export, of every installed plugin, whatever tables there are. No torch may be
    imported. An empty mapping: none.
    """


# Building the model
# ---------------------------------------------------------------------------------------------


@hookspec
def forge_build_decoder(session: TrainingSession) -> nn.Module | None:
    """The decoder, on the meta device (the core sets it as the default device during the call).

    It declares how it splits (`split()`, see `SplittableModel`) if it can. None declines.
    """


@hookspec
def forge_build_model(session: TrainingSession, decoder: nn.Module) -> nn.Module | None:
    """The whole model around `decoder`, on the meta device. None declines; the core answers with
    `decoder`."""


@hookspec
def forge_build_block(session: TrainingSession, layer: LayerInfo) -> nn.Module | None:
    """Block `layer.index`: `forward(x (B, S, D), context) -> (B, S, D)`, residuals included. None
    declines."""


@hookspec
def forge_build_mixer(session: TrainingSession, layer: LayerInfo) -> nn.Module | None:
    """The token mixer of a block (see `Mixer`). None declines; the core answers with attention."""


@hookspec
def forge_build_ffn(session: TrainingSession, layer: LayerInfo) -> nn.Module | None:
    """The feed-forward part of a block: `forward(x, context) -> (B, S, D)`. None declines; the core has an
    MLP."""


@hookspec
def forge_build_embed(session: TrainingSession, layer: LayerInfo) -> nn.Module | None:
    """The token embedding: `forward(tokens (B, S)) -> (B, S, D)`, with `weight` (V, D). None declines."""


@hookspec
def forge_blocks_after(session: TrainingSession, layer: LayerInfo) -> Iterable[nn.Module]:
    """Blocks inserted after block `layer.index`, called like blocks. An empty list: none."""


@hookspec
def forge_attention_masks(session: TrainingSession) -> Iterable[Any]:
    """Mask predicates, combined with the causal and document rule of attention.

    Each is a pair ("and" | "or", `f(context, q, k) -> bool tensor`), where q and k index positions of the
    sequence; "or" admits keys that causality would hide, "and" hides keys. An empty list: none.
    """


@hookspec
def forge_auxiliary_models(session: TrainingSession) -> Mapping[str, nn.Module]:
    """Helpers beside the model, not saved; `forge_core.frozen_twin` makes a reference model. Empty: none.

    Called when the model is in memory with the values it starts from, before a checkpoint is loaded. Each is
    frozen, on the device, and divided over the ranks by whoever makes it.
    """


@hookspec
def forge_model_transforms(session: TrainingSession) -> Iterable[Transform]:
    """Changes to the whole model, each at one of `forge_core.contract.PHASES`. An empty list: none."""


@hookspec
def forge_build_initial_weights(session: TrainingSession) -> InitialWeights | None:
    """Weights to start from, in place of random ones: `f(model)` fills the model in memory, whatever its
    layout.

    Asked only where `model.init_from` names a place; what it returns runs first in phase "adapt". None
    declines; if no plugin of a run answers, the key is refused.
    """


@hookspec
def forge_module_aliases(session: TrainingSession) -> Iterable[Alias]:
    """Names for parts of the model; which are frozen by default, and which are not saved. An empty list:
    none."""


# What runs in the loop
# ------------------------------------------------------------------------------------------


@hookspec
def forge_build_forward(session: TrainingSession, model: nn.Module) -> Forward | None:
    """How a micro-batch is counted and run, see `Forward`. Called per micro-batch. None declines."""


@hookspec
def forge_build_data(session: TrainingSession) -> DataPipeline | None:
    """The batches, evaluation sets and tokenizer, with one global position. None declines."""


@hookspec
def forge_build_optimizers(session: TrainingSession, model: nn.Module) -> Mapping[str, NamedOptimizer] | None:
    """Optimizers and schedules by name, usually one called "main". None declines.

    Groups must cover every parameter that ever trains (`session.freeze.ever_trainable()`), each exactly once.
    """


@hookspec
def forge_build_step_fn(session: TrainingSession) -> StepFn | None:
    """The step, see `StepFn`. The core's accumulates over micro-batches. None declines."""


@hookspec
def forge_extra_losses(session: TrainingSession, model: nn.Module) -> Iterable[LossTerm]:
    """Terms added to the objective, run per micro-batch. An empty list: none.

    A loss that is born inside a forward uses `forge_core.attach_loss` instead.
    """


@hookspec
def forge_before_updates(session: TrainingSession, model: nn.Module) -> Iterable[Any]:
    """Functions `f(step, batches)` run before update `step`, on every rank, whatever the step function.

    `batches` are all its micro-batches, on the CPU. For what has to be known of an update before it is
    trained on: `session.step_fn.forward_only(session, batches)` runs the model over them. An empty list:
    none.
    """


@hookspec
def forge_after_updates(session: TrainingSession, model: nn.Module) -> Iterable[Any]:
    """Functions `f(step, ok)` run after each update; `ok` is a () bool tensor on the device (averages of
    weights, balancing biases). They must not read `ok` on the host. An empty list: none."""


@hookspec
def forge_extra_metrics(session: TrainingSession, model: nn.Module) -> Iterable[Metric]:
    """Values measured on log steps. The core reduces and reads all of them back at once. An empty list:
    none."""


@hookspec
def forge_observers(session: TrainingSession) -> Iterable[Observer]:
    """Objects that are told of events, see `Observer`. An empty list: none."""


@hookspec
def forge_evaluators(session: TrainingSession) -> Mapping[str, Evaluator]:
    """Tasks beyond loss, by name: `f(session) -> {metric: number}`, run at each evaluation. Empty: none."""


@hookspec
def forge_build_generator(session: TrainingSession) -> Generator | None:
    """What generates from the model, see `Generator`. None declines."""


# Saving
# ---------------------------------------------------------------------------------------------------------


@hookspec
def forge_checkpoint_extras(session: TrainingSession) -> Iterable[CheckpointExtra]:
    """State that travels with checkpoints under the plugin's name. An empty list: none."""


@hookspec
def forge_build_checkpointer(session: TrainingSession) -> Checkpointer | None:
    """What keeps checkpoints. None declines; if all decline the run keeps none and says so."""


# Explaining
# -----------------------------------------------------------------------------------------------------


@hookspec
def forge_explanations(session: TrainingSession) -> Mapping[str, Sequence[str]]:
    """What `forge explain` says of the plugin's own: by heading (one short word), lines of text. Empty: none.

    Called for `forge explain` alone, with everything built and the model on the meta device.
    """
