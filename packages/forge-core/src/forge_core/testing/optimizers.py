"""What every optimizer has to hold, as tests that a plugin's optimizer inherits in a few lines:

from forge_core.testing.optimizers import OptimizerSuite

class TestMine(OptimizerSuite):
    def build(self, groups):
        return Mine(groups, lr=self.lr)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.utils._python_dispatch import TorchDispatchMode

from forge_core.config.tables import OptimizerConfig
from forge_core.optim import build_optimizer, guarded_step, optimizer_mode, parameter_groups, skips_on_device
from forge_core.optim.skip import step_unless_flagged

ROLES = {
    "embed.weight": "embedding",
    "hidden.weight": "matrix",
    "hidden.bias": "bias",
    "norm.weight": "norm",
    "norm.bias": "bias",
    "head.weight": "head",
}
SYMBOLS = 11
BROKEN = (float("nan"), float("inf"), float("-inf"))


class TinyModel(nn.Module):
    """A parameter of every role; (N,) int64 symbols -> (N, SYMBOLS) logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, 8)
        self.hidden = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, SYMBOLS, bias=False)

    def forward(self, symbols: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(F.gelu(self.hidden(self.embed(symbols)))))
        return logits


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts reads of tensors by the host while active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Parameters, optimizer state and numbers of groups by name; tensors as copies of their bytes."""
    found: dict[str, Any] = {}
    for name, p in model.named_parameters():
        found[name] = _bytes(p)
        for key, value in optimizer.state.get(p, {}).items():
            found[f"{name}.{key}"] = _bytes(value) if isinstance(value, Tensor) else value
    for i, group in enumerate(optimizer.param_groups):
        found |= {f"group {i} {key}": value for key, value in group.items() if key != "params"}
    return found


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Keys under which two results of `bits` differ."""
    return sorted(key for key in one.keys() | other.keys() if one.get(key, ...) != other.get(key, ...))


class OptimizerSuite:
    """Tests of one optimizer on a tiny model. Subclass it, name the class `Test...` and define `build`."""

    lr = 0.01
    weight_decay = 0.1
    updates = 60
    falls_to = 0.5
    """Share of the first loss that has to be reached after `updates`."""

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer under test over `groups` (see `parameter_groups`), with learning rate `self.lr`."""
        raise NotImplementedError

    def start(self, seed: int = 0) -> tuple[TinyModel, torch.optim.Optimizer]:
        """A model from `seed` and its optimizer, as a run builds it."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = TinyModel()
        config = OptimizerConfig(lr=self.lr, weight_decay=self.weight_decay)
        groups = parameter_groups(model.named_parameters(), ROLES, config, {})
        return model, build_optimizer(config, None, groups, lambda given, *_: self.build(given))

    def backward(self, model: nn.Module, update: int) -> Tensor:
        """Gradients of update number `update`; the loss."""
        generator = torch.Generator().manual_seed(update)
        symbols = torch.randint(SYMBOLS, (32,), generator=generator)
        loss = F.cross_entropy(model(symbols), (symbols * 3 + 1) % SYMBOLS)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def train(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, updates: Iterator[int] | range
    ) -> None:
        """Run updates of these numbers."""
        for update in updates:
            self.backward(model, update)
            guarded_step(optimizer, torch.tensor(True))
            optimizer.zero_grad(set_to_none=True)

    def test_loss_falls(self) -> None:
        model, optimizer = self.start()
        first = float(self.backward(model, 0))
        optimizer.zero_grad()
        self.train(model, optimizer, range(self.updates))
        with optimizer_mode(optimizer, "eval"):
            last = float(self.backward(model, 0))
        assert last < self.falls_to * first, f"loss {first:.3f} -> {last:.3f} in {self.updates} updates"

    def test_runs_repeat(self) -> None:
        runs = [self.start() for _ in range(2)]
        for model, optimizer in runs:
            self.train(model, optimizer, range(5))
        assert differences(bits(*runs[0]), bits(*runs[1])) == []

    def test_skipped_update_changes_nothing(self) -> None:
        for good_before in (0, 3):  # the very first update is the one where state may not exist yet
            (model, optimizer), (twin, its_optimizer) = self.start(), self.start()
            self.train(model, optimizer, range(good_before))
            self.train(twin, its_optimizer, range(good_before))
            before = bits(model, optimizer)
            for value in BROKEN:
                for p in model.parameters():
                    p.grad = torch.full_like(p, value)
                _refuse(optimizer)
                optimizer.zero_grad(set_to_none=True)
                assert differences(before, bits(model, optimizer)) == [], f"{value} leaked"
            self.train(model, optimizer, range(good_before, 6))
            self.train(twin, its_optimizer, range(good_before, 6))
            assert differences(bits(model, optimizer), bits(twin, its_optimizer)) == []

    def test_parameter_without_gradient_keeps_its_bits_and_state(self) -> None:
        model, optimizer = self.start()
        self.train(model, optimizer, range(3))
        frozen = [name for name, p in model.named_parameters() if name.startswith("hidden")]
        before = bits(model, optimizer)
        model.hidden.requires_grad_(False)
        self.train(model, optimizer, range(3, 6))
        changed = differences(before, bits(model, optimizer))
        assert not [key for key in changed if any(key.startswith(name) for name in frozen)]
        assert "embed.weight" in changed

    def test_zero_grad_clears_every_gradient(self) -> None:
        model, optimizer = self.start()
        self.backward(model, 0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert all(p.grad is None for p in model.parameters())

    def test_state_round_trip_by_name(self) -> None:
        for mode in ("train", "eval"):
            model, optimizer = self.start()
            self.train(model, optimizer, range(4))
            with optimizer_mode(optimizer, mode):
                saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
                weights = copy.deepcopy(model.state_dict())
            other, fresh = self.start(seed=1)
            with optimizer_mode(fresh, mode):
                other.load_state_dict(weights)
                set_optimizer_state_dict(other, fresh, saved)
            self.train(model, optimizer, range(4, 9))
            self.train(other, fresh, range(4, 9))
            assert differences(bits(model, optimizer), bits(other, fresh)) == [], f"saved in mode {mode}"

    def test_saving_and_evaluating_leave_no_trace(self) -> None:
        (model, optimizer), (twin, its_optimizer) = self.start(), self.start()
        for updates in (range(3), range(3, 6)):
            get_optimizer_state_dict(model, optimizer)
            with optimizer_mode(optimizer, "eval"):
                get_optimizer_state_dict(model, optimizer)
            self.train(model, optimizer, updates)
            self.train(twin, its_optimizer, updates)
        assert differences(bits(model, optimizer), bits(twin, its_optimizer)) == []

    def test_update_makes_no_host_sync(self) -> None:
        model, optimizer = self.start()
        if not skips_on_device(optimizer):
            return
        self.train(model, optimizer, range(1))
        self.backward(model, 1)
        ok = torch.tensor(True)
        assert _host_reads(lambda: step_unless_flagged(optimizer, ok)) == 0


def _host_reads(action: Callable[[], None]) -> int:
    reads = HostReads()
    with reads:
        action()
    return reads.count


def _refuse(optimizer: torch.optim.Optimizer) -> None:
    """An update that the guard refuses, decided in the kernels where the optimizer says that they can."""
    if skips_on_device(optimizer):
        step_unless_flagged(optimizer, torch.tensor(False))
    else:
        guarded_step(optimizer, torch.tensor(False))
