"""CLIP, SigLIP and the tower of Idefics 3 as transformers has them (Radford et al. 2021; Zhai et al. 2023;
Laurençon et al. 2024)."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.data.wording import counted
from forge_core.errors import DataError, ForgeError
from forge_core.model import copy_full_into, mark
from forge_vlm.encoders.keys import write_tower_keys
from forge_vlm.encoders.weights import TowerFiles
from forge_vlm.options import ClipOptions, Idefics3Options, SiglipOptions

_log = logging.getLogger("forge")


class HuggingFaceEncoder(nn.Module):
    """A vision tower of transformers, with random weights until `load_pretrained`.

    Args:
        options: see their tables.
        config, tower: names of its classes in transformers.
        skipped: tokens before those of the patches.
        normed: the last states are normed.
        more: what else its configuration says.

    Raises:
        ForgeError: transformers is not installed.
    """

    def __init__(
        self,
        options: ClipOptions | SiglipOptions | Idefics3Options,
        config: str,
        tower: str,
        *,
        skipped: int = 0,
        normed: bool = True,
        **more: Any,
    ) -> None:
        super().__init__()
        try:
            import transformers
        except ImportError as error:
            hint = 'pip install "forge-vlm[transformers]"'
            raise ForgeError("this encoder needs the package 'transformers'", hint) from error
        self.path, self.skipped, self.normed = options.path, skipped, normed
        keys = {**write_tower_keys(options.settled()), "attn_implementation": "sdpa", **more}
        made: Any = getattr(transformers, tower)(getattr(transformers, config)(**keys))
        # release 4 has the tower inside of the model, release 5 is without that layer
        self.tower = getattr(made, "vision_model", made)
        every = self.tower.encoder.layers
        self.layer = states_after(getattr(options, "layer", None), len(every))
        # a layer that is taken is one of those before, between and after the blocks: never None
        self.several = [states_after(layer, len(every)) or 0 for layer in getattr(options, "layers", ())]
        if self.several:
            self.layer = max(self.several)
        self.unmasked = _masks_of(every[0])
        for module in self.tower.modules():
            if "class_embedding" in module._parameters:
                mark(module, "class_embedding", role="other", init="normal")
            if "position_ids" in module._buffers:
                mark(module, "position_ids", init="zeros")
                module.forge_reset = _Counting(module)

    @property
    def blocks(self) -> list[nn.Module]:
        """Those that run: FSDP2 fails on a unit that never does where micro-batches are accumulated."""
        tower: Any = self.tower
        return list(tower.encoder.layers)[: self.layer]

    def forward(self, pixels: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, T, D): the states after block `layer`, or of several blocks side by side, or
        the last ones after the last norm.

        Blocks behind those states do not run.
        """
        x = self.embedded(pixels)
        states = {0: x}
        for number, block in enumerate(self.blocks, 1):
            y: Any = block(x, *[None] * self.unmasked)
            x = y[0] if isinstance(y, tuple) else y
            if number in self.several:
                states[number] = x
        if self.several:
            return torch.cat([states[number][:, self.skipped :] for number in self.several], -1)
        result: Tensor = self.tower.post_layernorm(x) if self.layer is None and self.normed else x
        return result[:, self.skipped :]

    def embedded(self, pixels: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, T, D) before the first block."""
        tower: Any = self.tower
        x: Tensor = tower.embeddings(pixels)
        before = getattr(tower, "pre_layrnorm", None)
        return x if before is None else before(x)

    def load_pretrained(self) -> None:
        """Take the weights of `path`, whatever the layout here; says how many there were.

        Raises:
            DataError: see `TowerFiles`; a weight of the model is not there, or has another shape.
        """
        if self.path is None:
            return
        own = dict(self.tower.named_parameters())
        files = TowerFiles(self.path, own)
        missing = [name for name in own if name not in files.names]
        if missing:
            message = f"{self.path} lacks {len(missing)} of {len(own)} weights, first {missing[0]}"
            raise DataError(message, "vlm.encoder.name has to be the kind of the tower that is in it")
        for name, parameter in own.items():
            found = files.read(name)
            if found.shape != parameter.shape:
                shapes = f"{tuple(found.shape)}, and {tuple(parameter.shape)} is expected"
                raise DataError(f"{name} in {self.path} is {shapes}")
            copy_full_into(parameter, found)
        rest = f", {counted(len(files.unused), 'tensor')} of it not used" if files.unused else ""
        # what is told while a model is built shows as a warning only
        _log.warning("encoder: all %d weights from %s%s", len(own), self.path, rest)


class WholePictures(HuggingFaceEncoder):
    """The tower of Idefics 3 on pictures without padding: every patch is there, so attention has no mask, and
    nobody has to look on the device whether one is needed."""

    def embedded(self, pixels: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, T, D) before the first block."""
        tower: Any = self.tower
        height, width = (side // tower.patch_size for side in pixels.shape[2:])
        there = torch.ones(len(pixels), height, width, dtype=torch.bool, device=pixels.device)
        x: Tensor = tower.embeddings(pixel_values=pixels, patch_attention_mask=there)
        return x


def states_after(layer: int | None, blocks: int) -> int | None:
    """How many blocks run before the states that are taken, None: all, and the last norm.

    Args:
        layer: index among the states before, between and after the blocks, from the end if negative.

    Raises:
        ForgeError: there are none of this index.
    """
    if layer is None:
        return None
    if not -blocks - 1 <= layer <= blocks:
        raise ForgeError(
            f"layer = {layer} of an encoder of {counted(blocks, 'block')}", "count from 0, or from -1 back"
        )
    return layer if layer >= 0 else blocks + 1 + layer


def _masks_of(block: nn.Module) -> int:
    """How many masks a block wants beside its input; releases of transformers differ."""
    given = list(inspect.signature(block.forward).parameters.values())[1:]
    return sum(each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD for each in given)


class _Counting:
    """Fills the numbers of positions, which are no parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, generator: Any) -> None:
        ids: Any = self.module.position_ids
        ids.copy_(torch.arange(ids.numel(), device=ids.device).view_as(ids))


def clip(options: ClipOptions) -> nn.Module:
    """Without the class token, unless it is kept."""
    skipped = int(not options.class_token)
    return HuggingFaceEncoder(options, "CLIPVisionConfig", "CLIPVisionModel", skipped=skipped, normed=False)


def siglip(options: SiglipOptions) -> nn.Module:
    """SigLIP, and SigLIP 2 of fixed resolution, whose checkpoints are SigLIP's."""
    more: dict[str, Any] = {"skipped": int(options.drop_first), "vision_use_head": False}
    return HuggingFaceEncoder(options, "SiglipVisionConfig", "SiglipVisionModel", **more)


def idefics3(options: Idefics3Options) -> nn.Module:
    """That of Idefics 3, which SmolVLM has, too."""
    return WholePictures(options, "Idefics3VisionConfig", "Idefics3VisionTransformer")
