"""Hugging Face's families that see, as `forge_architectures` gives them. Imports no torch.

A family is an `Architecture` in a module of its own: how it reads and writes a configuration whose text and
vision parts are nested (`text`, `towers`, `pictures`), and what its tensors are called. `faithful` makes sure
that nothing is lost when it writes.
"""

from forge_core.contract import Architecture
from forge_vlm.architectures.idefics3 import IDEFICS3
from forge_vlm.architectures.llava import LLAVA
from forge_vlm.architectures.mllama import MLLAMA
from forge_vlm.architectures.paligemma import PALIGEMMA
from forge_vlm.architectures.qwen_vl import QWEN_VL
from forge_vlm.architectures.text import with_text

ARCHITECTURES: dict[str, Architecture] = {
    name: with_text(architecture)
    for family in (LLAVA, PALIGEMMA, IDEFICS3, QWEN_VL, MLLAMA)
    for name, architecture in family.items()
}
"""By `model_type`; an export that is told none takes the first that has words for the model."""

__all__ = ["ARCHITECTURES"]
