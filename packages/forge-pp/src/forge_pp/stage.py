"""One stage as torch's schedules know it, whose micro-batches may each have shapes of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import P2POp, ProcessGroup
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._utils import _TensorMeta
from torch.distributed.pipelining.stage import _RecvInfo

Run = Callable[[int, int, tuple[Tensor, ...]], Any]
"""`run(stage, micro-batch, what came in) -> what goes out`; of the last stage, the loss."""


class Stage(PipelineStage):
    """torch's stage with the shapes told before each step instead of found out once.

    Buffers are made when something is to be received and let go of when its backward is done, so that a
    window holds only what is in flight, and the shapes of one micro-batch say nothing of the next.

    Args:
        part: module that the stage runs, for its parameters and for how it is sharded.
        index, count: number of the stage, and of all.
        owners: rank in `group` of each stage.
        run: runs a micro-batch.
    """

    def __init__(
        self,
        part: nn.Module,
        index: int,
        count: int,
        owners: dict[int, int],
        device: torch.device,
        group: ProcessGroup,
        run: Run,
    ) -> None:
        super().__init__(part, index, count, device, group=group)
        self.stage_index_to_group_rank = owners
        self.run = run
        self._metas: list[tuple[_TensorMeta, ...]] = []
        self._sending = 0

    def begin(self, window: Sequence[Sequence[Tensor]]) -> None:
        """A step begins.

        Args:
            window: for each micro-batch what travels between stages, on the meta device.
        """
        self.has_backward = True
        self.clear_runtime_states()
        self.chunks = len(window)
        self._metas = [tuple(_meta(tensor) for tensor in tensors) for tensors in window]
        before, after = self.stage_index - 1, self.stage_index + 1
        travels = range(max(len(metas) for metas in self._metas))
        self.act_send_info = {0: []} if self.is_last else {i: [after] for i in travels}
        self.args_recv_info, self.grad_recv_info, self.grad_send_info = {}, {}, None
        for chunk, metas in enumerate(self._metas):
            incoming = () if self.is_first else tuple(_awaited(before, m) for m in metas)
            returning = () if self.is_last else tuple(_awaited(after, _gradient(m)) for m in metas)
            self.args_recv_info[chunk], self.grad_recv_info[chunk] = incoming, returning

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        given = self.run(self.stage_index, kwargs["number"], args)
        return given if self.is_last else tuple(_own_memory(tensor, args) for tensor in given)

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[P2POp]:
        self._make_room(self.args_recv_info[fwd_chunk_id])
        ops: list[P2POp] = super().get_fwd_recv_ops(fwd_chunk_id)
        return ops

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        self._make_room(self.grad_recv_info[bwd_chunk_id])
        ops: list[P2POp] = super().get_bwd_recv_ops(bwd_chunk_id)
        return ops

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[P2POp]:
        self._sending = bwd_chunk_id
        self.grad_send_info = self._create_grad_send_info(self.args_recv_info[bwd_chunk_id])
        if bwd_chunk_id in self.bwd_cache:
            gradients = self.bwd_cache[bwd_chunk_id]
            self.bwd_cache[bwd_chunk_id] = tuple(g if g is None else g.contiguous() for g in gradients)
        ops: list[P2POp] = super().get_bwd_send_ops(bwd_chunk_id)
        return ops

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        for info, gradient in zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True):
            if gradient is None and info.tensor_meta is not None:
                info.buffer = info.tensor_meta.to_tensor(self.device).zero_()
        super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._stage_meta.inputs = () if self.is_first else self._metas[bwd_chunk_id]
        super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
        for info in (*self.args_recv_info[bwd_chunk_id], *self.grad_recv_info[bwd_chunk_id]):
            info.buffer = None

    def _get_grad_send_meta(self, input_idx: int) -> _TensorMeta | None:
        return _gradient(self._metas[self._sending][input_idx])

    def _make_room(self, infos: Sequence[_RecvInfo]) -> None:
        for info in infos:
            if info.tensor_meta is not None and info.buffer is None:
                meta = info.tensor_meta
                info.buffer = torch.empty(meta.shape, dtype=meta.dtype, device=self.device)


def _own_memory(tensor: Tensor, came: Sequence[Tensor]) -> Tensor:
    """What is sent lies in one piece; what is detached in place is no view, nor what came in."""
    passes = any(tensor is other for other in came)
    return tensor.clone() if passes or tensor._is_view() else tensor.contiguous()


def _meta(tensor: Tensor) -> _TensorMeta:
    return _TensorMeta(
        shape=tensor.shape,
        stride=tensor.stride(),
        dtype=tensor.dtype,
        requires_grad=tensor.is_floating_point(),
    )


def _gradient(meta: _TensorMeta) -> _TensorMeta | None:
    """Of what the gradient of a travelling tensor is; None for whole numbers."""
    if not meta.requires_grad:
        return None
    return _TensorMeta(shape=meta.shape, stride=meta.stride, dtype=meta.dtype, requires_grad=False)


def _awaited(stage: int, meta: _TensorMeta | None) -> _RecvInfo:
    return _RecvInfo(f"with stage {stage}", stage, None, meta)
