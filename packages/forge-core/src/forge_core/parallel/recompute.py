"""Activation checkpointing: a block computes again in the backward what it did not keep (Chen et al.
2016)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

KEPT = {
    "attention": ("scaled_dot_product", "flex_attention", "varlen_attn", "flash_attn", "ring_attention"),
    "matmul": ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "grouped_linear", "_scaled_mm", "linear"),
    "communication": ("_c10d_functional",),
}
"""What `train.recompute_keep` names, and the operators that are meant: for "matmul" by whole name."""


@attrs.frozen(kw_only=True)
class Recompute:
    """What is recomputed.

    Attributes:
        mode: "full": blocks whole; "selective": all operators of a block but the dear ones.
        every: every n-th block only.
        keep: with "selective", the kinds of operators (`KEPT`) whose results stay in memory.
    """

    mode: str = "full"
    every: int = 1
    keep: tuple[str, ...] = ("attention", "matmul")


def recompute_blocks(blocks: Sequence[nn.Module], how: Recompute) -> None:
    """Make every n-th of the blocks recompute; modules, names and signatures stay.

    The random state is put back for the recomputation, so that dropout masks are the same.
    """
    for number, block in enumerate(blocks):
        if number % how.every == 0:
            block.forward = recomputed(block.forward, how)


def recomputed(forward: Callable[..., Any], how: Recompute) -> Callable[..., Any]:
    """The same function, which keeps less for its backward."""
    options: dict[str, Any] = {"use_reentrant": False}
    if how.mode == "selective":
        options["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, functools.partial(_policy, frozenset(how.keep))
        )

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, **options, **kwargs)

    return run


def _policy(keep: frozenset[str], context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep the results of the named kinds of operators."""
    kept = any(_is(operator, kind) for kind in keep)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@functools.cache
def _is(operator: Any, kind: str) -> bool:
    namespace, _, rest = str(operator).partition(".")
    if kind == "communication":
        return namespace in KEPT[kind]
    name = rest.partition(".")[0] or namespace
    if kind == "matmul":
        return name in KEPT[kind]
    return any(part in str(operator) for part in KEPT[kind])
