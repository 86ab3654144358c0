"""Parts of the decoder through the hooks, so that a plugin can replace any layer's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
from torch import nn

from forge_core.config.tables import ModelConfig
from forge_core.contract import LayerInfo
from forge_core.errors import PluginError
from forge_core.plugins import CORE, Contribution

if TYPE_CHECKING:
    from forge_core.loop.session import TrainingSession


class HookedParts:
    """`LayerParts` whose every part is asked for with `forge_build_block`, `_mixer`, `_ffn` and `_embed`."""

    def __init__(self, session: TrainingSession) -> None:
        from forge_core.model.decoder import default_parts

        self.session = session
        self.default = default_parts(session.config[ModelConfig], mixer=self.mixer, ffn=self.ffn)

    def _ask(self, hook: str, layer: LayerInfo) -> nn.Module:
        from forge_core.config.tables import RunConfig

        choice = self.session.config[RunConfig].choose
        answer = self.session.plugins.choose(hook, choice, session=self.session, layer=layer)
        if answer is None:
            raise PluginError(f"nobody answers {hook} for layer {layer.index}")
        self._record(answer, layer)
        part: nn.Module = answer.value
        return part

    def _record(self, answer: Contribution, layer: LayerInfo) -> None:
        """Put a plugin's part into the plan; the core's own parts would only fill it."""
        if answer.plugin != CORE:
            where = f"layer {layer.index}" if layer.index >= 0 else "embedding"
            self.session.contributions.append(attrs.evolve(answer, value=(where, answer.value)))

    def block(self, layer: LayerInfo) -> nn.Module:
        return self._ask("forge_build_block", layer)

    def mixer(self, layer: LayerInfo) -> nn.Module:
        return self._ask("forge_build_mixer", layer)

    def ffn(self, layer: LayerInfo) -> nn.Module:
        return self._ask("forge_build_ffn", layer)

    def embed(self, layer: LayerInfo) -> nn.Module:
        return self._ask("forge_build_embed", layer)

    def blocks_after(self, layer: LayerInfo) -> Sequence[nn.Module]:
        found = self.session.plugins.collect("forge_blocks_after", session=self.session, layer=layer)
        for answer in found:
            self._record(answer, layer)
        return [c.value for c in found]

    def masks(self) -> Sequence[Any]:
        found = self.session.plugins.collect("forge_attention_masks", session=self.session)
        self.session.contributions += found
        return [c.value for c in found]
