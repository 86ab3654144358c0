"""The loss over a vocabulary that tensor ranks divide equals the plain one, and whole logits never exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.errors import ForgeError
from forge_core.loss import IGNORE, fused_cross_entropy
from forge_core.testing.pool import WorkerPool

WIDTH = 8


class Largest(TorchDispatchMode):
    """Remembers the most numbers in one result."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.numel())
        return result


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, z: float, cap: float | None
) -> tuple[Tensor, Tensor]:
    """The definition: softmax over whole rows."""
    logits = hidden @ weight.T
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    token_loss = F.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORE)
    squares = torch.where(targets != IGNORE, logits.logsumexp(1).square(), 0.0)
    return token_loss.sum() + z * squares.sum(), token_loss.detach()


def inputs(tokens: int, vocabulary: int, supervised: float) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, WIDTH, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocabulary, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) >= supervised] = IGNORE
    return hidden, weight, targets


def compared(vocabulary: int, z: float, cap: float | None, supervised: float, chunk: int) -> list[float]:
    """Largest differences of loss, token losses, and gradients of hidden states and weight."""
    hidden, weight, targets = inputs(24, vocabulary, supervised)
    mine = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected, expected_tokens = plain(*mine, targets, z, cap)
    (expected * 3).backward()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    laid = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    given = hidden.clone().requires_grad_()
    options: Any = {"z_loss_weight": z, "softcap": cap, "chunk_size": chunk}
    loss, token_loss = fused_cross_entropy(given, laid, targets, **options)
    (loss * 3).backward()
    assert given.grad is not None
    assert laid.grad is not None
    pairs = [
        (loss, expected),
        (token_loss, expected_tokens),
        (given.grad, mine[0].grad),
        (laid.grad.full_tensor(), mine[1].grad),
    ]
    with torch.no_grad():
        alone, _ = fused_cross_entropy(given, laid, targets, **options)
    return [float((a - b).detach().abs().max()) for a, b in [*pairs, (alone, expected)]]


CASES = {
    "even": (12, 0.0, None, 1.0, 0),
    "uneven, chunks": (13, 0.0, None, 1.0, 5),
    "z-loss": (13, 0.1, None, 0.6, 7),
    "capped": (13, 0.1, 2.0, 0.9, 0),
    "few supervised": (13, 0.1, None, 0.2, 0),
    "nothing supervised": (13, 0.1, None, 0.0, 0),
}


@pytest.mark.parametrize("name", CASES)
def test_a_divided_vocabulary_gives_the_plain_loss(pool2: WorkerPool, name: str) -> None:
    for differences in pool2.run(compared, *CASES[name]):
        assert max(differences) < 1e-12


def sizes() -> tuple[int, int]:
    hidden, weight, targets = inputs(64, 64, 1.0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    laid = distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
    given = hidden.requires_grad_()
    with Largest() as seen:
        loss, _ = fused_cross_entropy(given, laid, targets)
        loss.backward()
    return seen.elements, 64 * 64


def test_whole_logits_never_exist(pool2: WorkerPool) -> None:
    for largest, whole in pool2.run(sizes):
        assert largest <= whole // 2


def sharded_head() -> str:
    hidden, weight, targets = inputs(4, 12, 1.0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",))
    with pytest.raises(ForgeError) as caught:
        fused_cross_entropy(hidden, distribute_tensor(weight, mesh, [Shard(0)]), targets)
    return str(caught.value)


def test_a_head_that_data_ranks_share_is_refused(pool2: WorkerPool) -> None:
    for message in pool2.run(sharded_head):
        assert "after the model's own forward" in message
