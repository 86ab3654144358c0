"""What a decoder is built from, so that any part can come from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import nn

from forge_core.config.tables import ModelConfig
from forge_core.contract import LayerInfo
from forge_core.model.attention import Attention
from forge_core.model.block import Block
from forge_core.model.dimensions import Dimensions
from forge_core.model.masks import Predicate
from forge_core.model.mlp import MLP

BuildModule = Callable[[LayerInfo], nn.Module]


class LayerParts(Protocol):
    """Builders of the modules of a decoder, called once for every layer in order."""

    def block(self, layer: LayerInfo, /) -> nn.Module:
        """Block `layer.index`: `forward(x, context) -> (B, S, D)`, residuals included."""
        ...

    def mixer(self, layer: LayerInfo, /) -> nn.Module:
        """Its token mixer."""
        ...

    def ffn(self, layer: LayerInfo, /) -> nn.Module:
        """Its feed-forward part."""
        ...

    def embed(self, layer: LayerInfo, /) -> nn.Module:
        """The token embedding, with `weight` (V, D); `layer.index` is -1."""
        ...

    def blocks_after(self, layer: LayerInfo, /) -> Sequence[nn.Module]:
        """Blocks inserted after block `layer.index`."""
        ...

    def masks(self) -> Sequence[tuple[str, Predicate]]:
        """Mask predicates, see `AttentionMasks`."""
        ...


class DefaultParts:
    """The dense text family's own parts."""

    def __init__(self, mixer: BuildModule | None, ffn: BuildModule | None) -> None:
        self._mixer, self._ffn = mixer, ffn

    def block(self, layer: LayerInfo, /) -> nn.Module:
        return Block(layer.model, (self._mixer or self.mixer)(layer), (self._ffn or self.ffn)(layer))

    def mixer(self, layer: LayerInfo, /) -> nn.Module:
        return Attention(layer.model, layer.index)

    def ffn(self, layer: LayerInfo, /) -> nn.Module:
        return MLP(layer.model)

    def embed(self, layer: LayerInfo, /) -> nn.Module:
        d = Dimensions.of(layer.model)
        return nn.Embedding(d.vocab_size, d.dim)

    def blocks_after(self, layer: LayerInfo, /) -> Sequence[nn.Module]:
        return ()

    def masks(self) -> Sequence[tuple[str, Predicate]]:
        return ()


def default_parts(
    model: ModelConfig, *, mixer: BuildModule | None = None, ffn: BuildModule | None = None
) -> LayerParts:
    """The core's parts: embedding, attention, MLP, nothing inserted, no predicates.

    Args:
        model: the resolved table; checked here, each part reads its own layer's.
        mixer, ffn: where blocks get these from instead.

    Raises:
        ForgeError: the table is not resolved.
    """
    Dimensions.of(model)
    return DefaultParts(mixer, ffn)
