"""Names of parameters that do not depend on how the model is wrapped."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
PART = "_forge_part"
"""Start of the names under which a model that was cut keeps its parts; they count as wrappers."""


def global_name(name: str) -> str:
    """A parameter or module name without what compiling, checkpointing or cutting the model put in."""
    kept = (n for n in name.split(".") if n not in WRAPPERS and not n.startswith(PART))
    return ".".join(kept)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every distinct parameter by global name; a tied one under its first name."""
    return {global_name(name): parameter for name, parameter in model.named_parameters()}
