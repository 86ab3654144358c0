"""The decoder: embedding, blocks, final norm, head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_core.config.tables import ModelConfig
from forge_core.contract import LayerContext, LayerInfo, SplitSpec
from forge_core.errors import ForgeError
from forge_core.model.cache import DecoderCache
from forge_core.model.dimensions import Dimensions, slides
from forge_core.model.documents import positions_within
from forge_core.model.masks import AttentionMasks, Predicate
from forge_core.model.norm import build_norm
from forge_core.model.parts import LayerParts, default_parts
from forge_core.model.roles import mark
from forge_core.model.rope import RotaryTable, sliding_rope

if TYPE_CHECKING:
    from forge_core.parallel.sequence import SequencePart

__all__ = ["Decoder", "build_decoder", "default_parts"]


class Decoder(nn.Module):
    """A transformer decoder, by default as Llama has it (Touvron et al. 2023).

    `layers` is a dict from "0", "1", ... to blocks, in the order they run; block 3's inserted blocks follow
    it as "3_after0", "3_after1", .... After a split `embed`, `norm` and `head` may be None and `layers` a
    part.

    Attributes:
        rotary: rotary tables; an object with `RotaryTable.at`, so a family may replace it.
        rotary_sliding: those of sliding layers, where they are others.
        sliding: names of the layers with a window.
        masks: see `AttentionMasks`.
        part: how ranks divide the sequence, None where they do not. Then the forward takes whole sequences,
            and gives the hidden states of `part.own(tokens)`.
        first: whether whole sequences come in; False in a part that goes on from what another handed over.
    """

    part: SequencePart | None = None
    first: bool = True

    def __init__(
        self,
        model: ModelConfig,
        embed: nn.Module,
        layers: nn.ModuleDict,
        masks: Sequence[tuple[str, Predicate]] = (),
    ) -> None:
        super().__init__()
        d = Dimensions.of(model)
        self.config = model
        self.embed: nn.Module | None = embed
        self.layers = layers
        self.norm: nn.Module | None = build_norm(model, d.dim)
        self.head: nn.Linear | None = nn.Linear(d.dim, d.vocab_size, bias=False)
        if model.tie_embeddings:
            self.head.weight = embed.weight  # type: ignore[assignment]
        # a tied head is the embedding, also in a part of the model that has no embedding
        mark(self.head, role="embedding" if model.tie_embeddings else "head")
        self.rotary = RotaryTable(model)
        self.rotary_sliding = None if model.rope_theta_sliding is None else RotaryTable(sliding_rope(model))
        self.sliding = frozenset(str(i) for i in range(d.n_layers) if slides(model, i))
        self.masks = AttentionMasks(model.attention, masks, model.attention_softcap is not None)

    def forward(
        self,
        tokens: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        valid: Tensor | None = None,
        embeds: Tensor | None = None,
        cache: DecoderCache | None = None,
        extras: dict[str, Any] | None = None,
        apart: bool = False,
        document_count: int | None = None,
    ) -> Tensor:
        """Hidden states after the final norm (or after the last block of a part without norm).

        Args:
            tokens: (B, S) int64, or None when `embeds` (B, S, D) come from elsewhere.
            positions, documents, document_count, valid, extras: see `LayerContext`. Without positions they
                count from 0 in each document.
            cache: of `new_cache`; tokens follow those it holds, and `valid` (B, S) is about the new ones.
            apart: padding is in documents of its own, which keep it apart: no mask is made for `valid`.

        Returns:
            (B, S, D).

        Raises:
            ForgeError: not exactly one of tokens and embeds, a sequence beyond `max_seq_len`, or see
                `AttentionMasks.prepare`.
        """
        if (tokens is None) == (embeds is None):
            raise ForgeError("a decoder takes either tokens or embeds")
        if self.part is not None:
            tokens, embeds = self._enter(tokens, embeds, cache)
        x = embeds if embeds is not None else self.look_up(tokens)
        inputs: dict[str, Any] = {"positions": positions, "documents": documents, "valid": valid}
        inputs |= {"cache": cache, "extras": {} if extras is None else extras, "apart": apart}
        inputs["document_count"] = document_count
        whole: Any = None
        windowed: Any = None
        if self.sliding and not self.sliding.isdisjoint(self.layers.keys()):
            windowed = self.context(self._undivided(x), **inputs, sliding=True)
        if not self.sliding or not self.sliding.issuperset(self.layers.keys()):
            whole = self.context(self._undivided(x), **inputs)
        if self.part is not None and self.first:
            x = self.part.split(x)
        for name, block in self.layers.items():
            x = block(x, windowed if name in self.sliding else whole)
        if cache is not None:
            cache.length += x.shape[1]
        x = x if self.norm is None else self.norm(x)
        if self.part is None:
            return x
        return self.part.hand_over(x) if self.norm is None else self.part.join(x)

    def context(
        self,
        x: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        valid: Tensor | None = None,
        cache: DecoderCache | None = None,
        extras: dict[str, Any] | None = None,
        sliding: bool = False,
        apart: bool = False,
        document_count: int | None = None,
    ) -> LayerContext:
        """What the blocks of one kind share in one forward of x (B, S, D): rotary tables and mask.

        Where context ranks divide the sequence, x is this rank's part and all else describes the whole.

        Args:
            sliding: for the layers with a window instead of those without.
            apart: see `forward`.
        """
        if cache is not None:
            cache.admit(x, valid)
        if positions is None and documents is not None:
            positions = positions_within(documents)
        context = LayerContext(
            positions=positions,
            documents=documents,
            document_count=document_count,
            valid=None if apart else valid,
            window=self.config.sliding_window if sliding else None,
            cache=cache,
            part=self.part,
            extras={} if extras is None else extras,
        )
        ragged = documents is None or not self._compiled()
        context.mask = self.masks.prepare(context, x, ragged)
        context.valid = valid
        if self.part is not None:
            self.part.localise(context, x)
        rotary = self.rotary_sliding if sliding and self.rotary_sliding is not None else self.rotary
        context.cos, context.sin = rotary.at(x, context.positions, 0 if cache is None else cache.length)
        return context

    def logits(self, hidden: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, V).

        Raises:
            ForgeError: this part of the model has no head.
        """
        if self.head is None:
            raise ForgeError("this part of the model has no head")
        logits: Tensor = self.head(hidden)
        cap = self.config.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def split(self) -> SplitSpec:
        """How it divides into parts that run one after another."""
        tied = (("embed.weight", "head.weight"),) if self.config.tie_embeddings else ()
        return SplitSpec(
            entry=("embed",),
            blocks="layers",
            exit=("norm", "head"),
            tied=tied,
            needs=("documents", "positions"),
        )

    def new_cache(self, batch: int, length: int, device: Any = None, dtype: Any = None) -> DecoderCache:
        """An empty cache for `batch` rows of at most `length` tokens.

        Args:
            device, dtype: of what it stores; None: those of the first keys.
        """
        entries: list[Any] = [None] * self.config.n_layers
        for name, block in self.layers.items():
            make = getattr(block, "new_cache", None)
            if name.isdecimal() and make is not None:
                entries[int(name)] = make(batch, length, device, dtype)
        return DecoderCache(entries, length)

    def _enter(
        self, tokens: Tensor | None, embeds: Tensor | None, cache: DecoderCache | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """This rank's part of what comes in whole; what another part of the model hands over is one."""
        given = tokens if embeds is None else embeds
        assert self.part is not None
        assert given is not None
        self.part.begin(given.shape[1], self.first, cache is not None)
        mine = self.part.own(given) if self.first else given
        return (mine, None) if embeds is None else (None, mine)

    def _undivided(self, x: Tensor) -> Tensor:
        """What a context is made for: x, or where another part handed over the tokens of one tensor rank,
        something of the shape that the tokens of all have."""
        part = self.part
        if part is None or self.first or not part.by_tensor:
            return x
        return x[:, :1].expand(-1, x.shape[1] * part.count // part.ranks, -1)

    def look_up(self, tokens: Tensor | None) -> Tensor:
        """Embeddings of tokens (B, S) as they enter the first block, (B, S, D): `embedding_scale` is in them.

        Raises:
            ForgeError: this part of the model has no embedding.
        """
        if self.embed is None:
            raise ForgeError("this part of the model has no embedding: pass embeds")
        x: Tensor = self.embed(tokens)
        scale = self.config.embedding_scale
        return x if scale == 1.0 else x * scale

    def _compiled(self) -> bool:
        return any(
            getattr(block, "_compiled_call_impl", None) is not None or hasattr(block, "forge_compiled")
            for block in self.layers.values()
        )


def build_decoder(model: ModelConfig, parts: LayerParts) -> Decoder:
    """Put a decoder together, on the current default device.

    Args:
        model: the resolved table.
        parts: builders of its modules, see `default_parts`.

    Raises:
        ForgeError: the table is not resolved.
    """
    layers = nn.ModuleDict()
    embed = parts.embed(LayerInfo(index=-1, model=model))
    for index in range(Dimensions.of(model).n_layers):
        layer = LayerInfo(index=index, model=model)
        layers[str(index)] = parts.block(layer)
        for number, inserted in enumerate(parts.blocks_after(layer)):
            layers[f"{index}_after{number}"] = inserted
    return Decoder(model, embed, layers, parts.masks())
