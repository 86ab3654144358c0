"""The gradient of a loss term that a stage's modules alone give."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def settle(value: Tensor, came: Sequence[Tensor]) -> None:
    """Add the gradient of `value` () to the stage's parameters now, and to that of what came in once it is
    there.

    Its own backward, because a value that joins what a stage gives would lead from there to the parameters on
    a second path, which schedules that take backwards apart cannot follow.

    Args:
        value: of modules: of their parameters, and of what they kept of this micro-batch's forward.
        came: what the stage was handed for it.
    """
    if not value.requires_grad:
        return
    value.backward(retain_graph=True)  # type: ignore[no-untyped-call]
    for tensor in came:
        if tensor.grad is not None:
            own, tensor.grad = tensor.grad, None
            tensor.register_hook(lambda gradient, own=own: gradient + own)  # type: ignore[no-untyped-call]
