"""What plugins hand to the core: components, mesh axes, transforms, aliases, metrics, checkpoint extras."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from torch import Tensor, nn

PHASES = ("modify", "split", "shard", "remat", "compile", "data", "materialise", "adapt")
"""Order of model transforms: change modules (LoRA), cut into stages, shard (TP), recompute activations,
compile, data parallel (FSDP2), give memory and initial values, then warm start and freeze."""


@attrs.frozen(kw_only=True)
class Component:
    """A part that users pick by name (an optimizer, a writer, ...). Declaring one imports nothing.

    Attributes:
        category: what it is; any word, e.g. "optimizer". A table key declares the category it picks from.
        name: what users write. A third party's is written `plugin/name`.
        target: "module:object"; called as the category's page says to build the part.
        options: "module:Class" of the attrs table of its own options, or None for no options. The module must
            import no torch.
        help: one line for `forge plugins` and the reference.
    """

    category: str
    name: str
    target: str
    options: str | None = None
    help: str = ""


@attrs.frozen(kw_only=True)
class MeshAxis:
    """One dimension of the device mesh.

    Attributes:
        name: e.g. "tp".
        size: ranks along it; 1 leaves it out of the mesh, -1 takes the ranks that the other axes leave.
        place: outermost first: a smaller number varies slower over ranks (core: replicate 20, shard 30, cp
            40, tp 50).
        carved_from: name of the data axis whose ranks it regroups, instead of multiplying the world size.
        data_differs: ranks along it read different samples.
        loss_differs: ranks along it read the same samples, and their losses are parts that add up (parts of
            the sequence, stages); otherwise each has the whole loss.
        params_differ: ranks along it hold different parameters (not parts of the same ones).
    """

    name: str
    size: int
    place: int
    carved_from: str | None = None
    data_differs: bool = False
    loss_differs: bool = False
    params_differ: bool = False


@attrs.frozen(kw_only=True)
class Transform:
    """A change to the whole model at one of `PHASES`; within a phase: core first, then by plugin name.

    `apply(model) -> model` gets the model (on the meta device before "materialise") and returns it or a new
    one.
    """

    phase: str
    name: str
    apply: Callable[[nn.Module], nn.Module]


@attrs.frozen(kw_only=True)
class Alias:
    """A name for a part of the model, used by freeze, learning rates and reports.

    Attributes:
        name: the alias, e.g. "decoder".
        patterns: fnmatch patterns of global parameter names.
        frozen: frozen unless the `[freeze]` table says otherwise.
        saved: False leaves its parameters out of checkpoints.
    """

    name: str
    patterns: tuple[str, ...]
    frozen: bool = False
    saved: bool = True


@attrs.frozen(kw_only=True)
class Metric:
    """A measured value, asked for on log steps only (returned by `forge_extra_metrics`).

    Attributes:
        name: key in metrics.jsonl, e.g. "ema/distance".
        op: how ranks combine: "sum", "max", "min", or "ratio" (sum of numerators over sum of denominators).
            Of ranks that have the same loss (tensor parallel) one counts in sums.
        read: returns a 0-d tensor on the device (for "ratio" a pair), or None if there is nothing to say.
        finish: maps the reduced number to what is logged.
    """

    name: str
    op: str
    read: Callable[[], Tensor | tuple[Tensor, Tensor] | None]
    finish: Callable[[float], float] | None = None


@attrs.frozen(kw_only=True)
class CheckpointExtra:
    """State of a plugin that travels with checkpoints (returned by `forge_checkpoint_extras`).

    Attributes:
        name: unique in the plugin; stored under the plugin's name, so it clashes with nobody's.
        version: of the format.
        scope: "global" (rank 0 saves it), "rank" (every rank its own) or "sharded" (DTensors).
        state_dict: () -> tree of tensors, numbers, strings, lists and string-keyed dicts.
        load_state_dict: takes such a tree.
        compatible: (saved version, saved tree) -> "" or the reason why it cannot be loaded.
    """

    name: str
    version: int
    state_dict: Callable[[], Mapping[str, Any]]
    load_state_dict: Callable[[Mapping[str, Any]], None]
    scope: str = "global"
    compatible: Callable[[int, Mapping[str, Any]], str] | None = None


@attrs.frozen(kw_only=True)
class Flops:
    """FLOPs, forward and backward, of what not every token has alike (an answer to `forge_flops`).

    Attributes:
        token: of one token.
        counted: by the name of something that `Forward.count` counts (images, patches), of one of them.
        most: how many of them there are to a token, at most; what is estimated before a run.
    """

    token: float = 0.0
    counted: Mapping[str, float] = attrs.Factory(dict)
    most: Mapping[str, float] = attrs.Factory(dict)

    @property
    def expected(self) -> float:
        """Of one token, if there is as much as there can be of all that is counted."""
        return self.token + sum(each * self.most.get(name, 0.0) for name, each in self.counted.items())


@attrs.frozen(kw_only=True)
class NamedOptimizer:
    """An optimizer and its schedule (returned by name by `forge_build_optimizers`).

    Every parameter group holds `initial_lr`; before update n the loop sets `lr = initial_lr * schedule(n)`.
    `schedule(n)` is a pure function of the update number from 1, skipped updates included.
    """

    optimizer: Any
    schedule: Callable[[int], float]
