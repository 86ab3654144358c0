"""Names of parameters that do not depend on how the model is wrapped."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def global_name(name: str) -> str:
    """A parameter or module name without the parts that compiling or checkpointing put in."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every distinct parameter by global name; a tied one under its first name."""
    return {global_name(name): parameter for name, parameter in model.named_parameters()}
