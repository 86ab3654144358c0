"""Parameters that the first and the last stage share while each has a copy of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forge_core.loop.clip import settle_gradients
from forge_pp.window import Line


def add_gradients(parameters: Iterable[nn.Parameter], line: Line) -> None:
    """Give both copies of each parameter the sum of their gradients, bit for bit the same.

    Called by the ranks of the first and of the last stage, which are not one; others have no copy.
    """
    ends = {line.owners[0], line.owners[line.count - 1]}
    (other,) = ends - {line.group.rank()}
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    settle_gradients(trained)  # an embedding's may still be parts of a sum over tensor ranks
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        mine = _local(parameter.grad)
        theirs = _exchange(mine, dist.get_global_rank(line.group, other), line)
        mine.add_(theirs)  # a sum of two is the same in either order


def _exchange(mine: Tensor, peer: int, line: Line) -> Tensor:
    theirs = torch.empty_like(mine)
    operations = [
        dist.P2POp(dist.isend, mine.contiguous(), peer, line.group),
        dist.P2POp(dist.irecv, theirs, peer, line.group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return theirs


def _local(tensor: Tensor) -> Tensor:
    laid: Any = tensor
    local: Tensor = laid.to_local() if hasattr(laid, "to_local") else tensor
    return local
