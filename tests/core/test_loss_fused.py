"""The fused loss is the plain formula: values, gradients, memory, precision."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from forge_core.loss import IGNORE, fused_cross_entropy

D, V = 7, 23


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned, and the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations.append(str(func))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


def problem(
    tokens: tuple[int, ...] = (3, 11), dtype: torch.dtype = torch.float64, masked: float = 0.0, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and targets, of which a share `masked` supervises nothing."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(*tokens, D, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=dtype).requires_grad_()
    bias = torch.randn(V, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(0, V, tokens, generator=generator)
    targets[torch.rand(tokens, generator=generator) < masked] = IGNORE
    return hidden, weight, bias, targets


def reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, z: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Token by token, from the definition, in fp64."""
    loss = hidden.new_zeros((), dtype=torch.float64)
    token_loss = torch.zeros(targets.shape, dtype=torch.float64)
    for at in torch.cartesian_prod(*(torch.arange(n) for n in targets.shape)).reshape(-1, targets.ndim):
        where = tuple(at.tolist())
        if targets[where] == IGNORE:
            continue
        logits = weight.double() @ hidden[where].double()
        if bias is not None:
            logits = logits + bias.double()
        normaliser = logits.exp().sum().log()
        each = normaliser - logits[targets[where]]
        token_loss[where] = each.detach()
        loss = loss + each + z * normaliser**2
    return loss, token_loss


def gradients(loss: Tensor, *of: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, of, materialize_grads=True)


@pytest.mark.parametrize("masked", [0.0, 0.05, 0.5], ids=["all", "few masked", "half masked"])
@pytest.mark.parametrize("z", [0.0, 0.01], ids=["plain", "z-loss"])
@pytest.mark.parametrize("chunk_size", [0, 1, 5, 33, 100])
def test_value_and_gradients_equal_the_formula(chunk_size: int, z: float, masked: float) -> None:
    """33 tokens in chunks of 5 end with an uneven one; 0.05 keeps masked rows, 0.5 leaves them out."""
    hidden, weight, bias, targets = problem(masked=masked, seed=2)
    assert (masked > 0) == bool((targets == IGNORE).any())
    loss, token_loss = fused_cross_entropy(
        hidden, weight, targets, bias=bias, z_loss_weight=z, chunk_size=chunk_size
    )
    expected, expected_token_loss = reference(hidden, weight, targets, bias, z)
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(token_loss, expected_token_loss, atol=1e-12, rtol=1e-12)
    assert not token_loss.requires_grad
    torch.testing.assert_close(
        gradients(loss, hidden, weight, bias),
        gradients(expected, hidden, weight, bias),
        atol=1e-12,
        rtol=1e-12,
    )


@pytest.mark.parametrize("z", [0.0, 0.1])
def test_gradcheck(z: float) -> None:
    hidden, weight, bias, targets = problem((5,), masked=0.2)

    def loss(*of: Tensor) -> Tensor:
        return fused_cross_entropy(of[0], of[1], targets, bias=of[2], z_loss_weight=z, chunk_size=2)[0]

    assert torch.autograd.gradcheck(loss, (hidden, weight, bias))


def test_zero_logits_cost_the_logarithm_of_the_vocabulary() -> None:
    targets = torch.randint(0, 1000, (4, 8))
    loss, token_loss = fused_cross_entropy(torch.randn(4, 8, D), torch.zeros(1000, D), targets)
    torch.testing.assert_close(token_loss, torch.full((4, 8), math.log(1000)), atol=1e-6, rtol=0)
    assert loss.item() == pytest.approx(32 * math.log(1000), rel=1e-6)
    assert loss.dtype is token_loss.dtype is torch.float32


def test_large_logits_overflow_nothing() -> None:
    hidden = torch.tensor([[1e4, 0.0], [-1e4, 0.0]])
    weight = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])
    _, token_loss = fused_cross_entropy(hidden, weight, torch.tensor([0, 0]))
    assert token_loss.tolist() == [0.0, 2e4]


@pytest.mark.parametrize("z", [0.0, 0.1])
@pytest.mark.parametrize("shape", [(2, 5), (0,)], ids=["all masked", "no token"])
def test_nothing_supervised_is_an_exact_zero_with_a_graph(shape: tuple[int, ...], z: float) -> None:
    hidden, weight, bias, _ = problem(shape)
    targets = torch.full(shape, IGNORE)
    loss, token_loss = fused_cross_entropy(hidden, weight, targets, bias=bias, z_loss_weight=z)
    assert loss.item() == 0.0
    assert loss.requires_grad
    assert not token_loss.any()
    (loss * 0.5).backward()
    for tensor in (hidden, weight, bias):
        assert tensor.grad is not None
        assert tensor.grad.shape == tensor.shape
        assert not tensor.grad.any()


def test_masked_rows_that_are_kept_give_no_gradient() -> None:
    hidden, weight, _, targets = problem((4, 10))
    targets[1, 3] = targets[2, 0] = IGNORE
    loss, token_loss = fused_cross_entropy(hidden, weight, targets, z_loss_weight=0.1)
    loss.backward()
    assert hidden.grad is not None
    silent = hidden.grad.abs().sum(-1) == 0
    assert torch.equal(silent, targets == IGNORE)
    assert torch.equal(token_loss == 0, targets == IGNORE)


def test_three_tokens_and_one_move_the_bias_as_four_tokens_do() -> None:
    """b in R^2 at 0, three tokens of label 0 and one of label 1, in micro-batches of 3 and 1.

    The sum over the count of 4 has gradient (-0.25, +0.25); a mean of means would have none.
    """
    b = torch.zeros(2, requires_grad=True)
    for labels in ([0, 0, 0], [1]):
        hidden = torch.ones(len(labels), 1)
        loss, _ = fused_cross_entropy(hidden, torch.zeros(2, 1), torch.tensor(labels), bias=b, scale=1 / 4)
        loss.backward()
    torch.testing.assert_close(b.grad, torch.tensor([-0.25, 0.25]), atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    "scale", [1 / 21, torch.tensor(1 / 21, dtype=torch.float64)], ids=["float", "tensor"]
)
def test_micro_batches_add_up_to_one_batch(scale: float | Tensor) -> None:
    hidden, weight, _, targets = problem((3, 11), masked=0.3)
    parts = torch.zeros((), dtype=torch.float64)
    for rows in (slice(0, 1), slice(1, 3)):
        loss, _ = fused_cross_entropy(hidden[rows], weight, targets[rows], scale=scale, z_loss_weight=0.01)
        loss.backward()
        parts += loss.detach()
    whole, _ = fused_cross_entropy(hidden, weight, targets, z_loss_weight=0.01)
    torch.testing.assert_close(parts, whole.detach() * scale)
    expected = gradients(whole * scale, hidden, weight)
    torch.testing.assert_close((hidden.grad, weight.grad), expected, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_scale_and_incoming_gradient_multiply(factor: float) -> None:
    hidden, weight, _, targets = problem()
    loss, token_loss = fused_cross_entropy(hidden, weight, targets, scale=0.5)
    plain, plain_token_loss = reference(hidden, weight, targets)
    torch.testing.assert_close(loss, plain * 0.5)
    torch.testing.assert_close(token_loss, plain_token_loss)
    found = torch.autograd.grad(loss, (hidden, weight), torch.tensor(factor, dtype=torch.float64))
    torch.testing.assert_close(found, gradients(plain * (0.5 * factor), hidden, weight))


def test_a_scale_that_is_known_before_leaves_the_backward_nothing_to_do() -> None:
    hidden, weight, _, targets = problem()
    loss, _ = fused_cross_entropy(hidden, weight, targets, scale=0.5)
    with Largest() as mode:
        loss.backward()
    assert [name for name in mode.operations if "mul" in name] == []
    torch.testing.assert_close(weight.grad, gradients(reference(hidden, weight, targets)[0] * 0.5, weight)[0])


def test_only_wanted_gradients_are_computed() -> None:
    hidden, weight, bias, targets = problem((4, 8))
    inputs = {"hidden": hidden, "weight": weight, "bias": bias}
    with Largest() as everything:
        fused_cross_entropy(hidden, weight, targets, bias=bias)
    for name, tensor in inputs.items():
        for other in inputs.values():
            other.requires_grad_(other is tensor)
            other.grad = None
        with Largest() as mode:
            loss, _ = fused_cross_entropy(hidden, weight, targets, bias=bias)
        assert _products(mode) == _products(everything) - {"hidden": 1, "weight": 1, "bias": 2}[name]
        loss.backward()
        assert [key for key, other in inputs.items() if other.grad is not None] == [name]
        torch.testing.assert_close(
            tensor.grad, gradients(reference(hidden, weight, targets, bias)[0], tensor)[0]
        )


def _products(mode: Largest) -> int:
    return sum("mm" in operation for operation in mode.operations)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients_there_is_one_product_a_chunk(context: Callable[[], Any]) -> None:
    hidden, weight, _, targets = problem((4, 8), masked=0.3)
    with context(), Largest() as mode:
        loss, token_loss = fused_cross_entropy(hidden, weight, targets, chunk_size=40)
    assert _products(mode) == 1
    assert not loss.requires_grad
    torch.testing.assert_close(token_loss, reference(hidden, weight, targets)[1])


def test_full_logits_never_exist() -> None:
    """512 tokens times 4096 words in chunks of 32: no tensor is larger than a chunk of logits."""
    hidden = torch.randn(512, 16, requires_grad=True)
    weight = torch.randn(4096, 16, requires_grad=True)
    targets = torch.randint(0, 4096, (512,))
    with Largest() as mode:
        loss, _ = fused_cross_entropy(hidden, weight, targets, chunk_size=32, z_loss_weight=1e-4)
        (loss / 512).backward()
    assert mode.elements == 32 * 4096
    with Largest() as full:
        F.cross_entropy(hidden @ weight.t(), targets).backward()
    assert full.elements == 512 * 4096


def test_chosen_chunks_bound_the_logits_at_a_large_vocabulary() -> None:
    with Largest() as mode:
        fused_cross_entropy(torch.randn(300, 2), torch.randn(128_000, 2), torch.randint(0, 128_000, (300,)))
    assert mode.elements <= 1 << 24


def test_nothing_is_read_back_from_the_device() -> None:
    hidden, weight, _, targets = problem((4, 8), torch.float32, masked=0.3)
    with Largest() as mode:
        loss, _ = fused_cross_entropy(hidden, weight, targets, scale=torch.tensor(0.1), z_loss_weight=0.1)
        (loss * torch.tensor(2.0)).backward()
    reads = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")
    assert [name for name in mode.operations if any(read in name for read in reads)] == []


@pytest.mark.parametrize("autocast", [False, True], ids=["bf16 tensors", "autocast"])
def test_low_precision_is_computed_in_fp32_at_a_large_vocabulary(autocast: bool) -> None:
    """At 128k words a softmax or a sum in bf16 is off by 0.03 and more."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(32, 16), torch.randn(128_000, 16) * 0.5
    targets = torch.randint(0, 128_000, (32,))
    if autocast:
        hidden = hidden.bfloat16().requires_grad_()
        weight = weight.requires_grad_()
    else:
        hidden, weight = hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss, token_loss = fused_cross_entropy(hidden, weight, targets)
    exact = F.cross_entropy(hidden.float() @ weight.float().t(), targets, reduction="none")
    assert loss.dtype is token_loss.dtype is torch.float32
    assert (token_loss - exact).abs().max() < 1e-3
    assert abs(loss.item() / 32 - exact.mean().item()) < 1e-4
    found = gradients(loss, hidden, weight)
    assert [g.dtype for g in found] == [hidden.dtype, weight.dtype]
    for gradient, wanted in zip(found, gradients(exact.sum(), hidden, weight), strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-2, rtol=1e-2)


def test_tied_weight_gets_the_gradients_of_both_uses() -> None:
    _, table, _, targets = problem((2, 6))
    tokens = torch.randint(0, V, (2, 6))
    loss, _ = fused_cross_entropy(F.embedding(tokens, table).tanh(), table, targets, chunk_size=4)
    expected, _ = reference(F.embedding(tokens, table).tanh(), table, targets)
    torch.testing.assert_close(gradients(loss, table), gradients(expected, table))


def test_weight_that_is_no_leaf_and_hidden_that_is_not_contiguous() -> None:
    hidden, weight, _, targets = problem((3, 11))
    flipped = hidden.transpose(0, 1)
    loss, _ = fused_cross_entropy(flipped, (weight * 2).t().contiguous().t(), targets.t())
    expected, _ = reference(hidden, weight * 2, targets)
    torch.testing.assert_close(gradients(loss, hidden, weight), gradients(expected, hidden, weight))


def test_the_gradient_becomes_the_parameter_s_without_a_copy() -> None:
    hidden, weight, _, targets = problem()
    loss, _ = fused_cross_entropy(hidden, weight, targets)
    with Largest() as mode:
        (loss * 0.5).backward()
    assert [name for name in mode.operations if "clone" in name or "copy" in name] == []
    assert weight.grad is not None


def test_a_graph_that_is_kept_can_be_used_twice_and_one_that_is_not_says_so() -> None:
    hidden, weight, _, targets = problem()
    loss, _ = fused_cross_entropy(hidden, weight, targets)
    first = torch.autograd.grad(loss * 2, (hidden, weight), retain_graph=True)
    once = torch.autograd.grad(loss, hidden, retain_graph=True)
    torch.testing.assert_close(first[0], once[0] * 2)
    loss.backward()
    torch.testing.assert_close((hidden.grad, weight.grad), (first[0] / 2, first[1] / 2))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_under_activation_checkpointing() -> None:
    hidden, weight, _, targets = problem()

    def run(hidden: Tensor) -> Tensor:
        return fused_cross_entropy(hidden.tanh(), weight, targets, chunk_size=5)[0]

    recomputed: Tensor = checkpoint(run, hidden, use_reentrant=False)
    expected = gradients(run(hidden), hidden, weight)
    torch.testing.assert_close(gradients(recomputed * 1.0, hidden, weight), expected)


# torch hides this warning of its own where warnings are shown, not where they are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_code_around_it() -> None:
    torch._dynamo.reset()
    hidden, weight, _, targets = problem((3, 11), torch.float32, masked=0.2)

    def run(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        loss, token_loss = fused_cross_entropy(hidden.tanh() * 2, weight, targets, chunk_size=8)
        return loss * 0.5, token_loss + 1

    loss, token_loss = torch.compile(run, backend="aot_eager")(hidden, weight, targets)
    expected, expected_token_loss = run(hidden, weight, targets)
    torch.testing.assert_close((loss, token_loss), (expected, expected_token_loss))
    torch.testing.assert_close(gradients(loss, hidden, weight), gradients(expected, hidden, weight))


def test_a_label_outside_of_the_vocabulary_is_an_error() -> None:
    hidden, weight, _, targets = problem()
    targets[0, 0] = V
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        fused_cross_entropy(hidden, weight, targets)


@pytest.mark.parametrize("chunk_size", [0, 5])
@pytest.mark.parametrize("z", [0.0, 0.1])
def test_capped_logits_cost_what_the_formula_says(chunk_size: int, z: float) -> None:
    """cap * tanh(logits / cap) written out, with a cap small enough to bend every logit."""
    hidden, weight, bias, targets = problem(masked=0.3)
    loss, token_loss = fused_cross_entropy(
        hidden, weight, targets, bias=bias, z_loss_weight=z, chunk_size=chunk_size, softcap=1.5
    )
    gradients = torch.autograd.grad(loss, (hidden, weight, bias))
    logits = 1.5 * torch.tanh((hidden @ weight.T + bias) / 1.5)
    flat, labels = logits.reshape(-1, V), targets.reshape(-1)
    plain = F.cross_entropy(flat, labels, reduction="none", ignore_index=IGNORE)
    squares = (flat.logsumexp(1) ** 2)[labels != IGNORE].sum()
    torch.testing.assert_close(token_loss.reshape(-1), plain)
    torch.testing.assert_close(loss, plain.sum() + z * squares)
    expected = torch.autograd.grad(plain.sum() + z * squares, (hidden, weight, bias))
    torch.testing.assert_close(gradients, expected)
