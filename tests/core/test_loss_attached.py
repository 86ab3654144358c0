"""A loss attached inside a forward changes the objective by value / count, once, and keeps no graph alive."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from forge_core.loss import AttachedLosses, attach_loss
from forge_core.loss.attached import divided

# torch's compiler instantiates the autograd functions that it traces, and deprecates doing so.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

COUNTS = {"tokens": 10, "sequences": 4}
Run = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    """A gate whose weights carry a loss per token and one per sequence."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate = nn.Linear(4, 4, dtype=dtype)

    def losses(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        return 0.3 * weights.square().sum(), 0.1 * weights.amax(-1).sum()

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        by_token, by_sequence = self.losses(weights)
        weights = attach_loss(weights, by_token, "balance")
        weights = attach_loss(weights, by_sequence, "peak", per="sequences")
        return x + weights * x


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 4, generator=generator, dtype=torch.float64) for n in (7, 3)]


def step(layer: Layer, run: Run, attached: AttachedLosses, **begin: Any) -> dict[str, Tensor]:
    """An accumulated step of summed outputs over 10 tokens; gradients and what was attached."""
    layer.zero_grad()
    attached.begin_step(COUNTS, **begin)
    with attached.activate():
        for batch in batches():
            (run(batch).sum() / COUNTS["tokens"]).backward()
    weight, bias = layer.gate.weight.grad, layer.gate.bias.grad
    assert weight is not None
    assert bias is not None
    return {"weight": weight.clone(), "bias": bias.clone(), **attached.totals()}


def reference(layer: Layer, factor: float = 1.0) -> dict[str, Tensor]:
    """The whole objective of one big batch, written down."""
    x = torch.cat(batches())
    weights = layer.gate(x).softmax(-1)
    by_token, by_sequence = layer.losses(weights)
    balance, peak = by_token / COUNTS["tokens"], by_sequence / COUNTS["sequences"]
    objective = (x + weights * x).sum() / COUNTS["tokens"] + factor * (balance + peak)
    weight, bias = torch.autograd.grad(objective, (layer.gate.weight, layer.gate.bias))
    return {"weight": weight, "bias": bias, "balance": balance.detach(), "peak": peak.detach()}


def checkpointed(run: Run) -> Run:
    def with_recomputation(x: Tensor) -> Tensor:
        result: Tensor = checkpoint(run, x, use_reentrant=False)
        return result

    return with_recomputation


def compiled(run: Run) -> Run:
    return torch.compile(run, backend="aot_eager", fullgraph=True)


WAYS: dict[str, Callable[[Run], Run]] = {
    "eager": lambda run: run,
    "checkpointed": checkpointed,
    "compiled": compiled,
    "checkpointed around compiled": lambda run: checkpointed(compiled(run)),
    "compiled around checkpointed": lambda run: compiled(checkpointed(run)),
}


@pytest.mark.parametrize("way", WAYS)
def test_equals_the_objective_written_down(way: str) -> None:
    """Accumulated over two micro-batches, twice; the second step finds nothing of the first."""
    torch._dynamo.reset()
    layer, attached = Layer(), AttachedLosses()
    attached.declare("balance")
    attached.declare("peak", per="sequences")
    run = WAYS[way](layer)
    for _ in range(2):
        torch.testing.assert_close(step(layer, run, attached), reference(layer), atol=1e-13, rtol=1e-13)


def test_compiled_code_is_compiled_once_whatever_the_counts() -> None:
    torch._dynamo.reset()
    compilations: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compilations.append(1)
        return graph

    layer, attached = Layer(), AttachedLosses()
    attached.declare("balance")
    attached.declare("peak", per="sequences")
    run = torch.compile(layer, backend=backend, dynamic=True)
    for tokens in (10, 20, 30):
        attached.begin_step({"tokens": tokens, "sequences": tokens // 2})
        with attached.activate():
            run(batches()[0]).sum().backward()
    assert len(compilations) == 1


def test_names_that_turn_up_in_compiled_code() -> None:
    torch._dynamo.reset()
    layer, attached = Layer(), AttachedLosses()
    run = compiled(layer)
    for _ in range(3):
        torch.testing.assert_close(step(layer, run, attached), reference(layer))


@pytest.mark.parametrize("factor", [8.0, torch.tensor(8.0)], ids=["float", "tensor"])
def test_factor_scales_gradients_and_not_what_is_reported(factor: float | Tensor) -> None:
    layer, attached = Layer(), AttachedLosses()
    torch.testing.assert_close(step(layer, layer, attached, factor=factor), reference(layer, 8.0))


def test_sums_are_the_plain_values() -> None:
    layer, attached = Layer(), AttachedLosses()
    found = step(layer, layer, attached)
    assert found["balance"].item() == pytest.approx(attached.sums()["balance"].item() / 10)
    assert found["peak"].item() == pytest.approx(attached.sums()["peak"].item() / 4)


def test_layers_share_a_name() -> None:
    attached = AttachedLosses()
    attached.begin_step({"tokens": 2})
    w = torch.tensor([1.0, 2.0], requires_grad=True)
    with attached.activate():
        x = attach_loss(w, (3 * w[0]).sum(), "a")
        x = attach_loss(x, (5 * w[1]).sum(), "a")
        (0 * x.sum()).backward()
    torch.testing.assert_close(w.grad, torch.tensor([1.5, 2.5]))
    assert attached.totals()["a"].item() == pytest.approx((3 + 10) / 2)


@pytest.mark.parametrize("how", ["no session", "left", "no_grad"])
def test_outside_of_a_step_the_tensor_itself_comes_back(how: str) -> None:
    attached = AttachedLosses()
    attached.begin_step(COUNTS)
    x = torch.ones(3, requires_grad=True)
    if how == "no_grad":
        with attached.activate(), torch.no_grad():
            assert attach_loss(x, x.sum(), "a") is x
    else:
        if how == "left":
            with pytest.raises(RuntimeError, match="forward failed"), attached.activate():
                raise RuntimeError("forward failed")
        assert attach_loss(x, x.sum(), "a") is x
    assert attached.totals() == {}


def test_an_evaluation_inside_of_another_session_s_step_goes_to_the_innermost() -> None:
    outer, inner = AttachedLosses(), AttachedLosses()
    x = torch.ones(3, requires_grad=True)
    outer.begin_step(COUNTS)
    inner.begin_step(COUNTS)
    with outer.activate():
        with inner.activate():
            attach_loss(x, x.sum(), "a")
        attach_loss(x, 2 * x.sum(), "b")
    assert set(inner.totals()) == {"a"}
    assert set(outer.totals()) == {"b"}


def test_what_a_forward_elsewhere_left_behind_is_none_of_a_step_s_business() -> None:
    """As of a part of another model, which tensor ranks divided when it handed over."""
    attached = AttachedLosses()
    attached.begin_step(COUNTS)
    divided.now = True
    try:
        with attached.activate():
            assert not divided.now
            attach_loss(torch.ones(2, requires_grad=True), torch.tensor(3.0), "balance")
            divided.now = True
        assert attached.sums() == {"balance": 3.0}, "nothing waits to be added up over ranks"
        assert divided.now
    finally:
        divided.begin(False, None)


def test_a_step_without_anything_to_count_divides_by_one() -> None:
    attached = AttachedLosses()
    attached.begin_step({"tokens": 0})
    x = torch.ones(3, requires_grad=True)
    with attached.activate():
        attach_loss(x, x.sum() * 0, "a").sum().backward()
    assert attached.totals()["a"].item() == 0
    torch.testing.assert_close(x.grad, torch.ones(3))


def test_values_without_a_gradient_are_reported_and_change_nothing() -> None:
    attached = AttachedLosses()
    attached.begin_step({"tokens": 4})
    x = torch.ones(3, requires_grad=True)
    with attached.activate():
        attach_loss(x, torch.tensor(2.0), "a").sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(3))
    assert attached.totals()["a"].item() == 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_has_the_value_s_precision(dtype: torch.dtype) -> None:
    attached = AttachedLosses()
    attached.begin_step({"tokens": 4})
    x = torch.ones(3, dtype=dtype, requires_grad=True)
    with attached.activate():
        attach_loss(x, x.sum() * 2, "a").sum().backward()
    torch.testing.assert_close(x.grad, torch.full((3,), 1.5, dtype=dtype))


def test_mistakes_are_named() -> None:
    attached = AttachedLosses()
    attached.begin_step(COUNTS)
    x = torch.ones(3, requires_grad=True)
    with attached.activate():
        with pytest.raises(ValueError, match=r"'a': \(3,\) is no sum"):
            attach_loss(x, x * 2, "a")
        with pytest.raises(KeyError, match="'a' is per 'images', but the forward counts sequences, tokens"):
            attach_loss(x, x.sum(), "a", per="images")
        attach_loss(x, x.sum(), "a")
        with pytest.raises(ValueError, match="'a' is per 'tokens' and per 'sequences'"):
            attach_loss(x, x.sum(), "a", per="sequences")


@pytest.mark.parametrize("way", ["eager", "checkpointed"])
def test_no_graph_outlives_the_backward(way: str) -> None:
    layer, attached = Layer(), AttachedLosses()
    run = WAYS[way](layer)
    step(layer, run, attached)
    attached.begin_step(COUNTS)
    with attached.activate():
        result = run(batches()[0])
        value = result.sum()
        result_node, alive = weakref.ref(result), weakref.ref(value)
        value.backward()
        del result, value
    gc.collect()
    assert result_node() is None
    assert alive() is None
    kept = [*attached.totals().values(), *attached.sums().values(), *attached._sums.values()]
    assert kept
    assert all(tensor.grad_fn is None and not tensor.requires_grad for tensor in kept)


def test_the_number_of_live_graphs_does_not_grow() -> None:
    layer, attached = Layer(), AttachedLosses()

    def live() -> int:
        gc.collect()
        found = 0
        for item in gc.get_objects():
            if issubclass(type(item), Tensor) and item.grad_fn is not None:
                found += 1
        return found

    step(layer, checkpointed(layer), attached)
    first = live()
    history = [step(layer, checkpointed(layer), attached) for _ in range(20)]
    assert live() == first
    assert len(history) == 20
