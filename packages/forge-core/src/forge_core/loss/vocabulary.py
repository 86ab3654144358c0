"""The vocabulary divided over tensor ranks: what a softmax needs of the whole row, reduced (Shoeybi et al.
2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import attrs
import torch
from torch import Tensor

from forge_core.errors import ForgeError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TENSOR_AXIS = "tp"


@attrs.frozen
class VocabularySlice:
    """Rows of the head that this rank has.

    Attributes:
        group: ranks that share the vocabulary.
        first: number of the first row here.
        most: rows of the rank with the most, so that all cut their work alike.
    """

    group: ProcessGroup
    first: int
    most: int

    def locate(self, index: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Where targets `index` (n, 1) are among the `rows` here, and whether they are, (n, 1) bool."""
        place = index - self.first
        inside = (place >= 0) & (place < rows)
        return place.clamp(0, max(rows - 1, 0)), inside

    def softmax_(self, logits: Tensor, place: Tensor, inside: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Turn `logits` (n, rows) in place into exp(x - max x), the maximum over the whole vocabulary.

        Returns the logit at the target, log sum exp of the whole row, and the sum of exp(x - max x) over it,
        each (n, 1) and the same on all ranks. Two reductions of a few numbers a token.
        """
        picked = torch.where(inside, logits.gather(1, place), 0.0)
        largest = logits.amax(1, keepdim=True)
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, self.group)
        total = logits.sub_(largest).exp_().sum(1, keepdim=True)
        sums = torch.stack((picked, total))
        self.sum_(sums)
        picked, total = sums.unbind()
        return picked, largest + total.log(), total

    def sum_(self, tensor: Tensor) -> None:
        """Add up over the ranks, in place."""
        torch.distributed.all_reduce(tensor, group=self.group)


def vocabulary_slice(weight: Tensor) -> tuple[Tensor, VocabularySlice | None]:
    """This rank's rows of a head's weight (V, D), with a graph, and which they are; a plain weight is whole.

    Raises:
        ForgeError: the weight is sharded over other than tensor ranks: its gathered form is only there during
            and after the forward of the model that owns it.
    """
    if not hasattr(weight, "to_local"):
        return weight, None
    laid = cast(Any, weight)
    mesh, placements = laid.device_mesh, laid.placements
    if mesh.ndim != 1 or mesh.mesh_dim_names not in (None, (TENSOR_AXIS,)) or not placements[0].is_shard(0):
        raise ForgeError(
            f"the head's weight is laid out as {placements} over {mesh.mesh_dim_names}",
            "compute the loss after the model's own forward, which gathers its weights",
        )
    local: Tensor = laid.to_local(grad_placements=placements)
    most = -(-weight.shape[0] // mesh.size())
    first = min(mesh.get_local_rank() * most, weight.shape[0])
    return local, VocabularySlice(mesh.get_group(), first, most)
