"""Tensor parallel, with or without sequence parallel, by the plans of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from forge_core.contract import SplitSpec, TensorPlan
from forge_core.errors import ForgeError
from forge_core.loss.attached import divided
from forge_core.model.memory import shared_names, tie
from forge_core.model.roles import role_of
from forge_core.parallel.sequence import SequencePart, moved

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def split_parts(model: nn.Module) -> Iterator[tuple[nn.Module, SplitSpec]]:
    """Every part of the model that says how it splits, with what it says."""
    for module in model.modules():
        split = getattr(module, "split", None)
        spec = split() if callable(split) else None
        if isinstance(spec, SplitSpec):
            yield module, spec


def plan_of(module: nn.Module) -> TensorPlan | None:
    """What the module says of how ranks divide it; None if it says nothing."""
    method = getattr(module, "parallel_plan", None)
    plan = method() if callable(method) else None
    return plan if isinstance(plan, TensorPlan) else None


def is_norm(module: nn.Module) -> bool:
    """Whether all parameters of the module are a norm's."""
    names = [name for name, _ in module.named_parameters(recurse=False)]
    plain = [name for name in names if name != "bias"]
    return bool(plain) and all(role_of(module, name) == "norm" for name in plain)


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, part: SequencePart) -> nn.Module:
    """Divide embedding, blocks and head of every part of the model that splits over the ranks of `mesh`.

    Parameters that tensor ranks divide, and norms that see divided tokens, become DTensors; all others stay
    as they are, the same on every rank. Tied parameters stay tied.

    Args:
        model: on the meta device, or with values that are equal on all ranks.
        mesh: one dimension.
        part: of those ranks; its `tensor` is None without sequence parallel.

    Raises:
        ForgeError: no part of the model splits, or a plan names a module that is no `nn.Linear`.
    """
    shared = shared_names(model)
    found = list(split_parts(model))
    if not found:
        raise ForgeError("tensor parallel: no part of the model says how it splits", "give it split()")
    # a model around another may say the same of it once more
    blocks = {id(b): b for m, spec in found for b in m.get_submodule(spec.blocks).children()}
    ends = {id(end): end for m, spec in found for end in _ends(m, spec)}
    for block in blocks.values():
        _divide_block(block, mesh, part)
    for end in ends.values():
        _divide_end(end, mesh, part)
    tie(model, shared)
    return model


def _ends(module: nn.Module, spec: SplitSpec) -> Iterator[nn.Module]:
    """What stands before and after the blocks, as far as this part of the model has it."""
    for name in (*spec.entry, *spec.exit):
        found: Any = module
        for attribute in name.split("."):
            found = getattr(found, attribute, None)
        if found is not None:
            yield found


def _divide_end(module: nn.Module, mesh: DeviceMesh, part: SequencePart) -> None:
    """Embedding and head by vocabulary (Shoeybi et al. 2019), a norm by tokens."""
    style: ParallelStyle | None = None
    if isinstance(module, nn.Embedding):
        style = RowwiseParallel(input_layouts=Replicate())
    elif isinstance(module, nn.Linear) and role_of(module, "weight") in ("head", "embedding"):
        style = ColwiseParallel(output_layouts=Replicate())
    elif is_norm(module):
        _divide_norm(module, mesh, part)
    if style is not None:
        parallelize_module(module, mesh, style, src_data_rank=None)


def _divide_block(block: nn.Module, mesh: DeviceMesh, part: SequencePart) -> None:
    plan = plan_of(block)
    if plan is not None:
        _divide_by(plan, block, mesh, part)
    elif any(True for _ in block.parameters(recurse=False)):
        _run_whole(block, mesh, part)
    else:
        for child in block.children():
            plan = plan_of(child)
            if plan is not None and (plan.column or plan.row):
                _divide_by(plan, child, mesh, part)
            elif is_norm(child):
                _divide_norm(child, mesh, part)
            else:
                _run_whole(child, mesh, part)


def _divide_by(plan: TensorPlan, module: nn.Module, mesh: DeviceMesh, part: SequencePart) -> None:
    styles: dict[str, ParallelStyle] = {}
    for name in plan.column:
        styles[name] = ColwiseParallel()
    for name in plan.row:
        styles[name] = RowwiseParallel(output_layouts=Partial(), use_local_output=False)
    for name in plan.heads:
        styles[name] = SequenceParallel(sequence_dim=2, use_local_output=True)
    for name, style in styles.items():
        target = module.get_submodule(name)
        if name not in plan.heads and not isinstance(target, nn.Linear):
            raise ForgeError(f"parallel_plan of {type(module).__name__}: {name} is no nn.Linear")
        parallelize_module(target, mesh, style, src_data_rank=None)
    for name in plan.whole:
        _gather_for(module.get_submodule(name), mesh)

    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        divided.enter()
        x = DTensor.from_local(args[0], mesh, [_tokens(part)], run_check=False)
        return (x.redistribute(placements=[Replicate()]), *args[1:])

    def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        divided.leave()
        return _first(output, lambda y: y.redistribute(placements=[_tokens(part)]).to_local())

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def _divide_norm(norm: nn.Module, mesh: DeviceMesh, part: SequencePart) -> None:
    """A norm that sees each rank's tokens: its weight is shared, and the parts of its gradient add up."""
    if part.tensor is None:
        return
    for name, parameter in list(norm.named_parameters(recurse=False)):
        laid = DTensor.from_local(parameter.data, mesh, [Replicate()], run_check=False)
        norm.register_parameter(name, nn.Parameter(laid, requires_grad=parameter.requires_grad))

    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (DTensor.from_local(args[0], mesh, [_tokens(part)], run_check=False), *args[1:])

    norm.register_forward_pre_hook(enter)
    norm.register_forward_hook(lambda _, args, output: output.to_local())


def _gather_for(module: nn.Module, mesh: DeviceMesh) -> None:
    """A module between divided ones that needs the whole last dimension: every rank runs all of it."""

    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (moved(args[0], mesh, Shard(-1), Replicate()), *args[1:])

    def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return _first(output, lambda y: moved(y, mesh, Replicate(), Shard(-1)))

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def _run_whole(module: nn.Module, mesh: DeviceMesh, part: SequencePart) -> None:
    """A module that nobody knows how to divide: every rank runs it on all tokens, with the same result."""
    if part.tensor is None:
        return

    def enter(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        divided.enter()
        return (part.join(args[0]), *args[1:])

    def leave(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        whole = _first(output, part.split)
        divided.leave()
        return whole

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave)


def _tokens(part: SequencePart) -> Placement:
    """How the tokens between mixers are laid out over tensor ranks in the forward that runs."""
    return Shard(1) if part.by_tensor else Replicate()


def _first(output: Any, change: Callable[[Any], Tensor]) -> Any:
    """The output with its first tensor changed."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)
