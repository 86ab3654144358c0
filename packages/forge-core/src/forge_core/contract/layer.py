"""Seams inside a decoder: what a layer is built from and what it sees while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import attrs

if TYPE_CHECKING:
    from torch import Tensor, nn

    from forge_core.config.tables import ModelConfig
    from forge_core.parallel.sequence import SequencePart


@attrs.frozen(kw_only=True)
class LayerInfo:
    """One layer about to be built, as `forge_build_block`, `_mixer`, `_ffn` and `_embed` see it.

    Attributes:
        index: number of the layer from 0; -1 for the embedding.
        model: the resolved `[model]` table.
    """

    index: int
    model: ModelConfig


@attrs.define(kw_only=True)
class LayerContext:
    """What every mixer and FFN receives beside its input `x` (B, S, D); one object for the whole forward.

    A model with sliding and full layers has two, with one `cache` and one `extras`; a layer gets the one of
    its kind.

    Attributes:
        positions: (B, S) or (S,) int64, position of each token inside its document, or (B, A, S) on A axes
            (`model.rope_sections`); None means 0..S-1.
        documents: (B, S) int32, number of the document of each token, or None for one document a row.
        document_count: how many documents all rows have together at most, where the host knows: kernels for
            sequences of many lengths then need not ask the device; None: it does not.
        valid: (B, S) bool, False for padding; None means all valid. Invalid tokens take part in nothing
            that counts or routes tokens.
        cos, sin: rotary tables of these positions, fp32 (fp64 in an fp64 model), (S, 1, head_dim) or
            (B, S, 1, head_dim): they broadcast against (B, S, heads, head_dim). The first half of `sin` is
            negated.
        mask: what attention needs to keep documents apart, prepared once a forward; opaque, or None for
            causal.
        window: keys that a query sees in these layers, itself included; None: all. `mask` has it already.
        cache: state of incremental decoding, one entry a layer (mixers make their own), or None.
        part: which tokens of the whole sequence these are, where ranks divide it; None: all of them. All else
            here describes the tokens of this rank.
        extras: whatever a family passes to its own modules, by the plugin's name.
    """

    positions: Tensor | None = None
    documents: Tensor | None = None
    document_count: int | None = None
    valid: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    mask: Any = None
    window: int | None = None
    cache: list[Any] | None = None
    part: SequencePart | None = None
    extras: dict[str, Any] = attrs.Factory(dict)


@attrs.frozen(kw_only=True)
class TensorPlan:
    """How tensor and context ranks divide a mixer, an FFN or a whole block: what `parallel_plan()` returns.

    A module of a block that has no such method, and is no norm, runs whole on every tensor rank, on the whole
    sequence, and context parallelism refuses it.

    Attributes:
        column: names of the `nn.Linear` inside whose outputs are divided.
        row: of those whose inputs are divided, and whose outputs are summed: what the module returns is such
            a sum. With columns and rows the module gets its input as a DTensor.
        heads: norms inside that run on divided heads, input (B, S, heads, head_dim).
        whole: modules inside whose input and output are divided along the last dimension, and which need all
            of it: it is gathered for them.
        sequence: "tokens" for a module that treats each token alone, "attend" for one that looks at others
            through `forge_core.model.attend`; None: it needs the whole sequence.
    """

    column: tuple[str, ...] = ()
    row: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    sequence: str | None = None


class Mixer(Protocol):
    """Mixes tokens of a sequence: attention, or something in its place. An `nn.Module` with

    `forward(x, context)`: (B, S, D) -> (B, S, D), the residual not added;
    `new_cache(batch, length, device, dtype)`: its own cache object for generation;
    `parallel_plan()`, optional: a `TensorPlan`, how tensor and context ranks divide it.
    """

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor: ...

    def new_cache(self, batch: int, length: int, device: Any, dtype: Any) -> Any: ...


class AttentionMixer(Mixer, Protocol):
    """A mixer that says which part of it looks at other tokens, so that a family can put its own projections
    around one attention: `output(attend(*project(x, context), context.mask, **scores))`, with what a cache
    holds of keys and values in between.

    `project(x (B, S, D), context)`: queries (B, heads, S, W), keys (B, kv_heads, S, W) and values
    (B, kv_heads, S, E), each token's of that token alone;
    `attend`, `scores`: see `forge_core.model.attend`, and its further arguments;
    `output`: (B, heads, S, E) -> (B, S, D), each token alone;
    `index`: of its entry in `context.cache`.
    """

    attend: Any
    scores: dict[str, Any]
    index: int

    def project(self, x: Tensor, context: LayerContext) -> tuple[Tensor, Tensor, Tensor]: ...

    def output(self, y: Tensor) -> Tensor: ...


@attrs.frozen(kw_only=True)
class SplitSpec:
    """How a model divides into stages that run one after another.

    Attributes:
        entry: names of the submodules that only the first part needs (the embedding).
        blocks: name of the `nn.ModuleDict` of blocks in the order they run, keyed "0", "1", ...; blocks
            inserted after block 3 follow it as "3_after0", "3_after1", ....
        exit: names of the submodules that only the last part needs (final norm, head).
        tied: groups of parameter names that are one parameter.
        needs: batch keys that every part needs (documents, positions), besides what travels.
    """

    entry: tuple[str, ...]
    blocks: str
    exit: tuple[str, ...]
    tied: tuple[tuple[str, ...], ...] = ()
    needs: tuple[str, ...] = ()


class SplittableModel(Protocol):
    """A model that says how it can be split: `split()`; parts that are missing are None."""

    def split(self) -> SplitSpec: ...

    def get_submodule(self, target: str) -> nn.Module: ...
