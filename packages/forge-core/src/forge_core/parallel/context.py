"""Context parallel: each rank has a part of the tokens, and sees the keys and values of all."""

from __future__ import annotations

from torch import nn

from forge_core.errors import ForgeError
from forge_core.parallel.sequence import SequencePart
from forge_core.parallel.tensor import is_norm, plan_of, split_parts


def divide_sequence(model: nn.Module, part: SequencePart) -> nn.Module:
    """Tell every part of the model that splits which tokens this rank works on.

    Raises:
        ForgeError: no part can divide its sequence, or a module does not say that it can do with a part.
    """
    found = list(split_parts(model))
    takers = [module for module, _ in found if hasattr(module, "part")]
    served = {id(m.get_submodule(spec.blocks)) for m, spec in found if hasattr(m, "part")}
    if not found or any(id(m.get_submodule(spec.blocks)) not in served for m, spec in found):
        raise ForgeError("the model cannot divide its sequence over ranks", "it needs split() and `part`")
    for module, spec in found if part.context is not None else ():
        for name, block in module.get_submodule(spec.blocks).named_children():
            check_block(f"{spec.blocks}.{name}", block)
    for taker in takers:
        taker.part = part  # type: ignore[assignment]
    return model


def check_block(name: str, block: nn.Module) -> None:
    """Refuse a block with a module that needs more of the sequence than a context rank has.

    Raises:
        ForgeError: names the module.
    """
    plan = plan_of(block)
    if plan is not None and plan.sequence is not None:
        return
    for path, child in block.named_children():
        plan = plan_of(child)
        if not is_norm(child) and (plan is None or plan.sequence is None):
            raise ForgeError(
                f"context parallel: {name}.{path} ({type(child).__name__}) may need the whole sequence",
                "its parallel_plan() can say sequence='tokens' or 'attend'; or leave distributed.cp at 1",
            )
