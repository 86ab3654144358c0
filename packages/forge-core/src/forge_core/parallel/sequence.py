"""Which tokens of a sequence a rank works on, and how parts come together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from forge_core.loss.attached import divided
from forge_core.parallel.pieces import pieces_of, places_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from forge_core.contract import Batch, LayerContext


def moved(x: Tensor, mesh: DeviceMesh, source: Placement, target: Placement) -> Tensor:
    """Local x laid out as `source` on a 1-D mesh, as local tensor laid out as `target`.

    Backwards the gradient takes the same way: it comes in as `target`, which for `Replicate` means that every
    rank has the whole gradient.
    """
    laid = DTensor.from_local(x, mesh, [source], run_check=False)
    return laid.redistribute(placements=[target]).to_local()


class SequencePart:
    """How context ranks, and between mixers also tensor ranks, divide the tokens of a sequence.

    Context ranks: each has two pieces of the sequence, see `pieces_of`. Tensor ranks: what a context rank has
    is cut into tp pieces in order, for norms, residuals and dropout alone (sequence parallel; Korthikanti et
    al. 2022).

    Without context ranks in a forward with a cache, everything is whole, on each of them.

    Args:
        context: 1-D mesh of context ranks, None without.
        tensor: 1-D mesh of tensor ranks, None where they do not divide the sequence.
        attention: "gather" keys and values, or send them round a "ring"; "auto": the ring where the flash
            kernel can do all blocks.
    """

    def __init__(
        self,
        context: DeviceMesh | None = None,
        tensor: DeviceMesh | None = None,
        attention: str = "gather",
    ) -> None:
        self.context, self.tensor, self.attention = context, tensor, attention
        self.ring = "" if context is None else str(context.get_group().group_name)
        self.by_context = self.by_tensor = False
        self._indices: dict[tuple[int, torch.device, bool], tuple[Tensor, Tensor]] = {}

    def begin(self, length: int, whole: bool, cached: bool) -> None:
        """A forward of `length` tokens starts.

        Args:
            whole: they are all tokens of the sequence, not what another part of the model hands over.
            cached: a step of incremental decoding, which nobody divides.
        """
        self.by_context = self.context is not None and not cached
        if whole and self.by_context:
            pieces = 2 * self._size(self.context)
            if length % pieces:
                raise ValueError(f"{length} tokens cannot be cut into {pieces} pieces for context ranks")
            length //= self._size(self.context)
        if whole:
            self.by_tensor = self.tensor is not None and not cached and length % self._size(self.tensor) == 0
        if self.tensor is not None:
            divided.begin(self.by_tensor and not whole, self.tensor.get_group())

    @property
    def divides(self) -> bool:
        """Whether a block sees less than all tokens."""
        return self.by_context or self.by_tensor

    @property
    def ranks(self) -> int:
        """Context ranks that divide the sequence."""
        return self._size(self.context) if self.by_context else 1

    @property
    def count(self) -> int:
        """Into how many parts the tokens are cut that a block sees."""
        tensor = self._size(self.tensor) if self.by_tensor else 1
        return tensor * self.ranks

    def index(self, length: int, device: torch.device) -> Tensor:
        """(S,) int64 places of this rank's tokens in a sequence of `length`, ascending; all without context
        ranks."""
        return self._order(length, device)[0]

    def own(self, tensor: Tensor, dim: int = 1) -> Tensor:
        """The part of this context rank of a tensor over the whole sequence, along `dim`."""
        if not self.by_context:
            return tensor
        return tensor.index_select(dim, self.index(tensor.shape[dim], tensor.device))

    def own_batch(self, batch: Batch) -> Batch:
        """The batch with what runs along the sequence, as `tokens` does, cut to this context rank's."""
        if not self.by_context:
            return batch
        shape = batch["tokens"].shape
        return {
            name: self.own(value) if isinstance(value, Tensor) and value.shape[:2] == shape else value
            for name, value in batch.items()
        }

    def split(self, x: Tensor) -> Tensor:
        """(B, S, D), the same on all tensor ranks -> (B, S / tp, D) of this one."""
        if not self.by_tensor or self.tensor is None:
            return x
        divided.now = True
        return moved(x, self.tensor, Replicate(), Shard(1))

    def join(self, x: Tensor) -> Tensor:
        """The way back from `split`."""
        if not self.by_tensor or self.tensor is None:
            return x
        divided.now = False
        # a copy, since FSDP2 warns of a model whose output is a view
        return moved(x, self.tensor, Shard(1), Replicate()).clone()

    def hand_over(self, x: Tensor) -> Tensor:
        """What a part of the model gives to the next one, divided as it is."""
        divided.now = False
        return x

    def residual(self, whole: Tensor) -> Tensor:
        """(B, S, ...) over the whole sequence -> what stands beside a block's own input; without a
        gradient."""
        mine = self.own(whole)
        if not self.by_tensor or self.tensor is None:
            return mine
        return mine.chunk(self._size(self.tensor), 1)[self.tensor.get_local_rank()]

    def gather(self, tensor: Tensor, dim: int) -> Tensor:
        """All tokens in order along `dim`, from the part of each context rank.

        Backwards each rank adds up what all found for its part.
        """
        assert self.context is not None
        laid = DTensor.from_local(tensor, self.context, [Shard(dim)], run_check=False)
        whole = laid.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
        return whole.index_select(dim, self._order(whole.shape[dim], tensor.device)[1])

    def localise(self, context: LayerContext, x: Tensor) -> None:
        """Turn the context of a whole sequence into that of x (B, S, D), this context rank's tokens."""
        if not self.by_context:
            return
        length = x.shape[1] * self._size(self.context)
        if context.positions is None:
            context.positions = self.index(length, x.device)
        else:
            context.positions = self.own(context.positions, context.positions.ndim - 1)
        context.documents = None if context.documents is None else self.own(context.documents)
        context.valid = None if context.valid is None else self.own(context.valid)

    def pieces(self, length: int) -> tuple[tuple[int, int], ...]:
        """(first, one past the last) of each run of neighbours among this rank's tokens."""
        if not self.by_context:
            return ((0, length),)
        assert self.context is not None
        return pieces_of(length, self._size(self.context), self.context.get_local_rank())

    def _order(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """This rank's places, and for each place of the sequence where it is when parts are joined."""
        found = self._indices.get((length, device, self.by_context))
        if found is None:
            if self.by_context and self.context is not None:
                size = self._size(self.context)
                parts = [places_of(length, size, rank, device) for rank in range(size)]
                found = parts[self.context.get_local_rank()], torch.cat(parts).argsort()
            else:
                places = torch.arange(length, device=device)
                found = places, places
            self._indices[length, device, self.by_context] = found
        return found

    @staticmethod
    def _size(mesh: Any) -> int:
        return 1 if mesh is None else int(mesh.size())
