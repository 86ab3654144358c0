"""What each parameter is for, known from the module that owns it and never from its name in the model."""

from __future__ import annotations

from typing import TypeVar

import attrs
from torch import nn

M = TypeVar("M", bound=nn.Module)

ROLES = ("norm", "bias", "embedding", "head", "matrix", "matrices", "other")
"""`matrices` is a stack of matrices (n, out, in) in one parameter."""

INITS = ("normal", "residual", "zeros", "ones")
"""Initial values: normal(0, std); normal(0, std / sqrt(2 n_layers)), for matrices that write to the residual
stream; constants."""

_MARKS = "forge_marks"
_NORMS = (nn.RMSNorm, nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
_MATRICES = (nn.Linear, nn.modules.conv._ConvNd)
_INIT_OF = {
    "norm": "ones",
    "bias": "zeros",
    "embedding": "normal",
    "head": "normal",
    "matrix": "normal",
    "matrices": "normal",
}


@attrs.frozen
class Mark:
    """What `mark` said of one parameter or buffer; None leaves the rule of its module type in force."""

    role: str | None = None
    init: str | None = None
    axes: tuple[str, ...] = ()
    copies: int = 1


def mark(
    module: M,
    parameter: str = "weight",
    *,
    role: str | None = None,
    init: str | None = None,
    axes: tuple[str, ...] = (),
    copies: int = 1,
) -> M:
    """Say what a parameter of `module` (its own, not a submodule's) is for, how it starts, or who shares it.

    Plugins mark parameters that they register themselves, and whatever differs from the rule of its module
    type: `mark(nn.Linear(...), init="residual")`, `mark(self, "w_down", role="matrices", init="residual")`.
    Buffers take `init` alone.

    Args:
        module: owner.
        parameter: attribute name.
        role: one of `ROLES`.
        init: one of `INITS`.
        axes: mesh axes that are carved from a data axis and along which ranks hold different parameters here
            (a plain tensor; a DTensor's layout says it).
        copies: in how many parts of a model that is cut into pieces this parameter exists (one that is tied
            over pieces), so that the global norm counts it once.

    Returns:
        `module`.

    Raises:
        ValueError: no such role or init.
    """
    if role is not None and role not in ROLES:
        raise ValueError(f"role {role!r} is not one of {', '.join(ROLES)}")
    if init is not None and init not in INITS:
        raise ValueError(f"init {init!r} is not one of {', '.join(INITS)}")
    marks: dict[str, Mark] = module.__dict__.setdefault(_MARKS, {})
    said = marks.get(parameter, Mark())
    marks[parameter] = Mark(
        role or said.role, init or said.init, axes or said.axes, copies if copies > 1 else said.copies
    )
    return module


def mark_of(module: nn.Module, name: str) -> Mark:
    """What was said of a parameter or buffer that `module` owns."""
    marks: dict[str, Mark] = module.__dict__.get(_MARKS, {})
    return marks.get(name, Mark())


def role_of(module: nn.Module, name: str) -> str:
    """Role of the parameter `name` that `module` owns: as marked, else by the type of the module."""
    marked = mark_of(module, name).role
    if marked is not None:
        return marked
    if name == "bias":
        return "bias"
    if isinstance(module, _NORMS):
        return "norm"
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "matrix" if isinstance(module, _MATRICES) else "other"


def init_of(module: nn.Module, name: str) -> str | None:
    """Initial values of a parameter: as marked, else by its role; None: nothing is known."""
    return mark_of(module, name).init or _INIT_OF.get(role_of(module, name))


def buffer_init_of(module: nn.Module, name: str) -> str | None:
    """Initial values of a buffer: as marked; None: nothing is known."""
    return mark_of(module, name).init


def parameter_roles(model: nn.Module) -> dict[str, str]:
    """Role of every parameter by its name in `model`; a tied one once, under its first name."""
    roles: dict[str, str] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                roles[f"{path}.{name}" if path else name] = role_of(module, name)
    return roles
