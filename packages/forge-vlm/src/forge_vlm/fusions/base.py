"""What every fusion offers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from forge_core.config.tables import RunConfig
from forge_core.contract import LayerContext, LayerInfo
from forge_core.errors import ForgeError, PluginError
from forge_core.model.dropout import dropout
from forge_core.model.masks import Predicate
from forge_vlm.fusions.masks import EXTRAS, RULES
from forge_vlm.table import VlmConfig

if TYPE_CHECKING:
    from forge_core import TrainingSession


class Fusion:
    """Base of fusions: override what differs. Options may say `in_sequence = False`: visual tokens then take
    no place in the sequence.

    Args:
        session: as hooks see it before the model is built.
        options: its own.

    Attributes:
        features_travel: whether modules of the decoder look at visual tokens, which then travel with hidden
            states between the parts of a model that was cut. False saves that where they only enter the
            sequence.
    """

    features_travel: bool = True

    def __init__(self, session: TrainingSession, options: Any) -> None:
        self.session, self.options = session, options

    def build_block(self, layer: LayerInfo) -> nn.Module | None:
        """Block `layer.index` of the decoder; None leaves it to others."""
        return None

    def build_ffn(self, layer: LayerInfo) -> nn.Module | None:
        """The feed-forward part of a block; None leaves it to others."""
        return None

    def build_embed(self, layer: LayerInfo) -> nn.Module | None:
        """The embedding of tokens; None leaves it to others."""
        return None

    def blocks_after(self, layer: LayerInfo) -> Iterable[nn.Module]:
        """Blocks inserted after block `layer.index`."""
        return ()

    def ask(self, hook: str, layer: LayerInfo) -> nn.Module:
        """What the other plugins, or the core, answer to `forge_build_mixer` or `forge_build_ffn` for a layer
        whose block the fusion builds: a new module each time.

        Raises:
            PluginError: nobody answers with a module.
        """
        choice = self.session.config[RunConfig].choose
        found = self.session.plugins.choose(hook, choice, session=self.session, layer=layer)
        if found is None or not isinstance(found.value, nn.Module):
            raise PluginError(f"nobody answers {hook} for layer {layer.index} with a module")
        return found.value

    def masks(self) -> Iterable[tuple[str, Predicate]]:
        """Mask predicates, see `forge_attention_masks`; by the option `bidirectional` where there is one."""
        return RULES[getattr(self.options, "bidirectional", "none")]

    def positions(
        self,
        tokens: Tensor,
        images: dict[str, Tensor] | None,
        memory: dict[str, Any],
        inputs: dict[str, Any],
    ) -> Tensor | None:
        """Where the tokens (B, S) of one forward stand, (B, S); None lets the decoder count. Not asked where
        the decoder rotates by several axes.

        Args:
            images: see `forge_vlm.model.Images`; None where this forward has none.
            memory: keeps what is to be known from one step of a generation to the next.
            inputs: `positions`, `documents` and `cache` as the decoder would get them.
        """
        given: Tensor | None = inputs["positions"]
        return given

    def run(
        self,
        decoder: Any,
        tokens: Tensor,
        index: Tensor | None,
        marks: dict[str, Any],
        inputs: dict[str, Any],
    ) -> Tensor:
        """Hidden states (B, S, D).

        Args:
            tokens: (B, S); where an image stands any id.
            index: (B, S) int64, the visual token at each position or -1; None: there is none among these, as
                with `in_sequence = False`.
            marks: `features` (B, N, D) or None, and what else is known of all tokens, see
                `VisionLanguageModel`; modules of the decoder find it in `context.extras["vlm"]`, with `index`
                as `here`.
            inputs: arguments of the decoder; `embeds` among them in a part that goes on from another.
        """
        if "embeds" not in inputs:
            x = decoder.look_up(tokens)
            if index is not None:
                x = place(x, marks["features"], index)
            inputs = {**inputs, "embeds": x}
        hidden: Tensor = decoder(extras={EXTRAS: {**marks, "here": index}}, **inputs)
        return hidden


def place(text: Tensor, features: Tensor, index: Tensor) -> Tensor:
    """`text` (B, S, D) with visual tokens (B, N, D) where `index` (B, S) is not -1, as precise as `text`."""
    at = index.clamp(min=0)[..., None].expand(-1, -1, features.shape[-1])
    return torch.where((index >= 0)[..., None], features.gather(1, at).to(text.dtype), text)


def dropped(block: Any, x: Tensor, context: LayerContext) -> Tensor:
    """What a block is to add, x (B, S, D), dropped as its `dropout`, that of `[model]`, says."""
    return dropout(x, block.dropout, block.training, context) if block.dropout else x


def fusion_of(session: TrainingSession) -> Fusion:
    """The one fusion of this session, made when first asked for.

    Raises:
        ForgeError: the component is no `Fusion`.
    """
    found = _MADE.get(id(session))
    if found is None or found.session is not session:
        name = session.config[VlmConfig].fusion
        found = session.component("vlm_fusion", name)(session, session.options("vlm", name))
        if not isinstance(found, Fusion):
            raise ForgeError(f"the fusion {name} is a {type(found).__name__}", "derive it from Fusion")
        _MADE[id(session)] = found
        session.exit_stack.callback(_MADE.pop, id(session), None)
    return found


_MADE: dict[int, Fusion] = {}
