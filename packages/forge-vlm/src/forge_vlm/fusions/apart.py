"""Modules with weights for each modality, of which every token takes its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from forge_core.contract import LayerContext, TensorPlan
from forge_vlm.fusions.experts import whole_visual

ATTENTION = ("project", "output", "attend", "scores", "index")
"""What an `AttentionMixer` of the contract has beside a mixer's."""


def attends(mixer: nn.Module) -> bool:
    """Whether a mixer says which part of it looks at other tokens."""
    return all(hasattr(mixer, name) for name in ATTENTION)


def mixed(text: nn.Module, image: nn.Module) -> nn.Module:
    """`text`, an `AttentionMixer`, with the projections of `image` for visual tokens, and its own attention
    over all. Its weights keep their names, those of `image` are below that name."""
    kind = type(text)
    if kind not in _KINDS:
        _KINDS[kind] = type(f"Mixed{kind.__name__}", (Mixed, kind), {})
    text.__class__ = _KINDS[kind]
    text.image = image
    return text


class Mixed:
    """What `mixed` adds to the class of a mixer."""

    image: Any

    def forward(self, x: Tensor, context: LayerContext) -> Tensor:
        """(B, S, D) -> (B, S, D), the residual not added."""
        mixer: Any = super()
        here = visual(context, x)
        if here is None:
            alone: Tensor = mixer.forward(x, context)
            return alone
        this: Any = self
        pairs = zip(self.image.project(x, context), mixer.project(x, context), strict=True)
        q, k, v = (torch.where(here[:, None], ours, theirs) for ours, theirs in pairs)
        if context.cache is not None:
            k, v = context.cache[this.index].append(k, v)
        y = this.attend(q, k, v, context.mask, **this.scores)
        return chosen(here, self.image.output(y), mixer.output(y))

    def parallel_plan(self) -> TensorPlan:
        """As that of the mixer, of both modalities."""
        mixer: Any = super()
        return twice(mixer.parallel_plan())


_KINDS: dict[type[nn.Module], type[nn.Module]] = {}


def twice(plan: TensorPlan) -> TensorPlan:
    """The plan of a module that has the same again as `image`."""
    names = {
        field: tuple(x for name in getattr(plan, field) for x in (name, f"image.{name}"))
        for field in ("column", "row", "heads", "whole")
    }
    return TensorPlan(**names, sequence=plan.sequence)


def chosen(here: Tensor, image: Tensor, text: Tensor) -> Tensor:
    """`image` where `here` (B, S, 1), else `text`, (B, S, D) each, also where tensor ranks hold what is to be
    added up over them."""
    if not isinstance(text, DTensor):
        return torch.where(here, image, text)
    mine = DTensor.from_local(here, text.device_mesh, [Replicate()], run_check=False)
    # a choice is no sum of what ranks hold, these products are
    return text * ~mine + image * mine


def visual(context: LayerContext, x: Tensor) -> Tensor | None:
    """Which of the tokens x (B, S, D) are visual, (B, S, 1) bool; None: none of them."""
    here = whole_visual(context)
    if here is None:
        return None
    part = context.part
    if part is not None and here.shape[1] != x.shape[1] and part.tensor is not None:
        here = here.chunk(part.tensor.size(), 1)[part.tensor.get_local_rank()]
    return here[..., None]
