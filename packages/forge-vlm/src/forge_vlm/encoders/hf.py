"""CLIP and SigLIP as transformers has them (Radford et al. 2021; Zhai et al. 2023)."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from forge_core.errors import ForgeError
from forge_core.model import copy_full_into, mark
from forge_vlm.options import ClipOptions, SiglipOptions

_log = logging.getLogger("forge")


class HuggingFaceEncoder(nn.Module):
    """A vision tower of transformers, with random weights until `load_pretrained`.

    Raises:
        ForgeError: transformers is not installed.
    """

    def __init__(self, options: ClipOptions | SiglipOptions, kind: str, skipped: int) -> None:
        super().__init__()
        try:
            import transformers
        except ImportError as error:
            hint = 'pip install "forge-vlm[transformers]"'
            raise ForgeError("this encoder needs the package 'transformers'", hint) from error
        self.path, self.layer, self.skipped = options.path, options.layer, skipped
        self.kind: Any = getattr(transformers, f"{kind}VisionModel")
        sizes = options.sizes()
        config = getattr(transformers, f"{kind}VisionConfig")(
            hidden_size=sizes["hidden_size"],
            intermediate_size=sizes["intermediate_size"],
            num_hidden_layers=sizes["num_hidden_layers"],
            num_attention_heads=sizes["num_attention_heads"],
            image_size=sizes["image_size"],
            patch_size=sizes["patch_size"],
            **({"hidden_act": sizes["hidden_act"]} if "hidden_act" in sizes else {}),
            **({"layer_norm_eps": sizes["layer_norm_eps"]} if "layer_norm_eps" in sizes else {}),
            **({"vision_use_head": False} if kind == "Siglip" else {}),
            attn_implementation="sdpa",
        )
        self.tower = self.kind(config)
        for module in self.tower.modules():
            if "class_embedding" in module._parameters:
                mark(module, "class_embedding", role="other", init="normal")
            if "position_ids" in module._buffers:
                mark(module, "position_ids", init="zeros")
                module.forge_reset = _Counting(module)

    @property
    def blocks(self) -> list[nn.Module]:
        """Units for sharding."""
        found = [m for name, m in self.tower.named_modules() if name.endswith("encoder.layers")]
        return list(found[0].children()) if found else []

    def forward(self, pixels: Tensor) -> Tensor:
        """(N, 3, H, W) -> (N, T, D): the states after layer `layer`, or the last ones after the last norm."""
        if self.layer is None:
            last: Tensor = self.tower(pixel_values=pixels).last_hidden_state
            return last[:, self.skipped :]
        states = self.tower(pixel_values=pixels, output_hidden_states=True).hidden_states
        chosen: Tensor = states[self.layer]
        return chosen[:, self.skipped :]

    def load_pretrained(self) -> None:
        """Take the weights of `path`, whatever the layout here; says how many there were.

        Raises:
            ForgeError: a weight of the model is not there.
        """
        if self.path is None:
            return
        with torch.device("cpu"):
            found = self.kind.from_pretrained(self.path, use_safetensors=True).state_dict()
        missing = []
        own = dict(self.tower.named_parameters())
        for name, parameter in own.items():
            if name in found:
                copy_full_into(parameter, found[name])
            else:
                missing.append(name)
        if missing:
            raise ForgeError(f"{self.path} lacks {len(missing)} of {len(own)} weights, first {missing[0]}")
        _log.info("encoder: all %d weights from %s", len(own), self.path)


class _Counting:
    """Fills the numbers of positions, which are no parameters."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, generator: Any) -> None:
        ids: Any = self.module.position_ids
        ids.copy_(torch.arange(ids.numel(), device=ids.device).view_as(ids))


def clip(options: ClipOptions) -> nn.Module:
    """Without the class token."""
    return HuggingFaceEncoder(options, "CLIP", 1)


def siglip(options: SiglipOptions) -> nn.Module:
    """SigLIP, and SigLIP 2 of fixed resolution, whose checkpoints are SigLIP's."""
    return HuggingFaceEncoder(options, "Siglip", 0)
