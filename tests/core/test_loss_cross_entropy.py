"""The loss a run builds: the same numbers, whether fused, plain for small sizes, or from logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forge_core.config.tables import LossConfig
from forge_core.loss import IGNORE, CrossEntropy, build_cross_entropy, cross_entropy_from_logits

Z = {"plain": 0.0, "z-loss": 0.01}


def problem(
    dtype: torch.dtype = torch.float64, vocabulary: int = 50, tokens: int = 12
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, tokens, 8, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(vocabulary, 8, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(0, vocabulary, (2, tokens), generator=generator)
    targets[0, 3] = targets[1, :4] = IGNORE
    return hidden, weight, targets


def expected(hidden: Tensor, weight: Tensor, targets: Tensor, z: float) -> tuple[Tensor, Tensor]:
    logits = hidden.double() @ weight.double().t()
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    normaliser = logits.logsumexp(-1)[targets != IGNORE]
    return each.sum() + z * (normaliser**2).sum(), each.detach()


@pytest.mark.parametrize("z", Z.values(), ids=Z)
@pytest.mark.parametrize("vocabulary", [50, 20_000], ids=["small", "fused"])
@pytest.mark.parametrize("how", ["head", "logits"])
def test_every_way_gives_the_same(how: str, vocabulary: int, z: float) -> None:
    hidden, weight, targets = problem(vocabulary=vocabulary)
    loss = build_cross_entropy(LossConfig(z_loss_weight=z))
    if how == "head":
        found, token_loss = loss(hidden, weight, targets)
    else:
        found, token_loss = loss.from_logits(hidden @ weight.t(), targets)
    wanted, wanted_token_loss = expected(hidden, weight, targets, z)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(token_loss, wanted_token_loss)
    assert not token_loss.requires_grad
    torch.testing.assert_close(
        torch.autograd.grad(found, (hidden, weight)), torch.autograd.grad(wanted, (hidden, weight))
    )


@pytest.mark.parametrize("scale", [0.25, torch.tensor(0.25)], ids=["float", "tensor"])
@pytest.mark.parametrize("vocabulary", [50, 20_000], ids=["small", "fused"])
def test_scale_multiplies_the_loss_and_not_the_token_losses(vocabulary: int, scale: float | Tensor) -> None:
    hidden, weight, targets = problem(vocabulary=vocabulary)
    wanted, wanted_token_loss = expected(hidden, weight, targets, 0.0)
    for loss, token_loss in (
        CrossEntropy()(hidden, weight, targets, scale=scale),
        CrossEntropy().from_logits(hidden @ weight.t(), targets, scale=scale),
    ):
        torch.testing.assert_close(loss, wanted * 0.25)
        torch.testing.assert_close(token_loss, wanted_token_loss)
        torch.testing.assert_close(
            torch.autograd.grad(loss, (hidden, weight)),
            torch.autograd.grad(wanted * 0.25, (hidden, weight), retain_graph=True),
        )


@pytest.mark.parametrize("vocabulary", [50, 20_000], ids=["small", "fused"])
def test_a_scale_of_more_precision_does_not_change_the_loss_s(vocabulary: int) -> None:
    hidden, weight, targets = problem(torch.float32, vocabulary)
    loss, token_loss = CrossEntropy()(hidden, weight, targets, scale=torch.tensor(0.25, dtype=torch.float64))
    assert loss.dtype is token_loss.dtype is torch.float32
    assert all(g.dtype is torch.float32 for g in torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("vocabulary", [50, 20_000], ids=["small", "fused"])
def test_nothing_supervised_is_zero_with_a_graph(vocabulary: int) -> None:
    hidden, weight, targets = problem(vocabulary=vocabulary)
    targets.fill_(IGNORE)
    for z in Z.values():
        loss = CrossEntropy(z_loss_weight=z)
        for total, token_loss in (
            loss(hidden, weight, targets),
            loss.from_logits(hidden @ weight.t(), targets),
        ):
            assert total.item() == 0.0
            assert not token_loss.any()
            for gradient in torch.autograd.grad(total, (hidden, weight)):
                assert not gradient.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_logits_of_low_precision_are_summed_in_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 20_000, dtype=torch.float32).to(dtype)
    targets = torch.randint(0, 20_000, (2, 3))
    with torch.autocast("cpu", torch.bfloat16):
        loss, token_loss = cross_entropy_from_logits(logits, targets, 1e-4)
    exact = logits.double().logsumexp(-1) - logits.double().gather(-1, targets[..., None])[..., 0]
    assert loss.dtype is token_loss.dtype is torch.float32
    torch.testing.assert_close(token_loss.double(), exact, atol=1e-5, rtol=0)


def test_autocast_leaves_the_small_form_exact() -> None:
    hidden, weight, targets = problem(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss, token_loss = CrossEntropy()(hidden, weight, targets)
    wanted, wanted_token_loss = expected(hidden, weight, targets, 0.0)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(token_loss.double(), wanted_token_loss, atol=1e-5, rtol=0)
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-4)


def test_the_table_chooses_weight_and_chunks() -> None:
    found: Any = build_cross_entropy(LossConfig(z_loss_weight=0.5, chunk_size=7))
    assert (found.z_loss_weight, found.chunk_size) == (0.5, 7)


# torch hides this warning of its own where warnings are shown, not where they are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("vocabulary", [50, 20_000], ids=["small", "fused"])
def test_in_compiled_code(vocabulary: int) -> None:
    torch._dynamo.reset()
    hidden, weight, targets = problem(torch.float32, vocabulary)
    compiled = torch.compile(CrossEntropy().__call__, backend="aot_eager")
    loss, token_loss = compiled(hidden, weight, targets, scale=0.5)
    wanted, wanted_token_loss = CrossEntropy()(hidden, weight, targets, scale=0.5)
    torch.testing.assert_close((loss, token_loss), (wanted, wanted_token_loss))
    torch.testing.assert_close(
        torch.autograd.grad(loss, (hidden, weight)), torch.autograd.grad(wanted, (hidden, weight))
    )
