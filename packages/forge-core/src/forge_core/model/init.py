"""Initial values by role, the same from one seed on every layout of the model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import attrs
import torch
from torch import Tensor, nn

from forge_core.errors import ForgeError
from forge_core.loop.naming import global_name as unwrapped_name
from forge_core.model.roles import buffer_init_of, init_of

GlobalName = Callable[[str], str]


def generator_for(seed: int, name: str) -> torch.Generator:
    """The CPU generator that belongs to one parameter: seeded by seed and global name alone."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big") >> 1)


@torch.no_grad()
def copy_full_into(target: Tensor, full: Tensor) -> None:
    """Copy a whole tensor into `target`, or into this rank's shard of it if `target` is a DTensor.

    Args:
        target: parameter or buffer.
        full: its global value, on any device, equal on all ranks; nothing is communicated.
    """
    if hasattr(target, "placements"):
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(target, DTensor)
        full = full.to(device=target.device, dtype=target.dtype)
        part = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
        target.to_local().copy_(part.to_local())
    else:
        target.copy_(full)


@torch.no_grad()
def initialise(
    model: nn.Module, seed: int, std: float, n_layers: int, *, global_name: GlobalName = unwrapped_name
) -> None:
    """Fill every parameter and buffer of `model`, which must be in memory.

    A parameter starts by its role (`forge_core.model.mark`): norms 1, biases 0, the rest normal(0, std), and
    normal(0, std / sqrt(2 n_layers)) for what writes to the residual stream (GPT-2; Radford et al. 2019). It
    is drawn whole, in fp32, on the CPU, from a generator of its own, so neither the layout, nor the order,
    nor the other parameters change it.

    A module with parameters of no known role, or with buffers, either marks them or defines
    `forge_reset(generator)`, which fills what the module itself owns: `generator(name)` is the generator of
    its parameter `name`, and `copy_full_into` writes it, sharded or not. It runs after the rules above and
    without gradients.

    Args:
        seed: of the run.
        std: standard deviation of matrices and embeddings.
        n_layers: layers of the whole decoder.
        global_name: name of a parameter on every layout from its name in `model`.

    Raises:
        ForgeError: nothing says how a parameter or buffer starts; names all of them.
    """
    scales = {"normal": std, "residual": std / math.sqrt(2 * n_layers)}
    first_names = _first_names(model)
    missed: list[str] = []
    done: set[int] = set()

    def draw(name: str) -> torch.Generator:
        plain = global_name(name)
        return generator_for(seed, first_names.get(plain, plain))

    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        reset = getattr(module, "forge_reset", None)
        for name, tensor, rule in _own(module):
            if id(tensor) in done:
                continue
            done.add(id(tensor))
            if rule in scales:
                _draw_into(tensor, scales[rule], draw(prefix + name))
            elif rule is not None:
                _fill(tensor, rule)
            elif reset is None:
                missed.append(prefix + name)
        if reset is not None:
            reset(_Prefixed(draw, prefix))
    if missed:
        raise ForgeError(
            f"nothing says how {', '.join(missed)} start",
            "use forge_core.model.mark(module, name, role=...), or define forge_reset(generator) there",
        )


@attrs.frozen
class _Prefixed:
    """Generators by the name that a parameter has in its own module."""

    draw: Callable[[str], torch.Generator]
    prefix: str

    def __call__(self, name: str) -> torch.Generator:
        return self.draw(self.prefix + name)


def _first_names(model: nn.Module) -> dict[str, str]:
    """By each name of a parameter tied across the whole model, its first: a part may hold only another."""
    split = getattr(model, "split", None)
    groups = split().tied if callable(split) else ()
    return {name: group[0] for group in groups for name in group}


def _own(module: nn.Module) -> list[tuple[str, Tensor, str | None]]:
    """Parameters and buffers that `module` itself owns, with how they start."""
    parameters = [(n, p, init_of(module, n)) for n, p in module.named_parameters(recurse=False)]
    buffers = [(n, b, buffer_init_of(module, n)) for n, b in module.named_buffers(recurse=False)]
    return [*parameters, *buffers]


def _draw_into(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    full = torch.empty(tensor.shape, dtype=torch.float32, device="cpu")
    copy_full_into(tensor, full.normal_(0.0, std, generator=generator))


@torch.no_grad()
def _fill(tensor: Tensor, rule: str) -> None:
    tensor.fill_(1.0 if rule == "ones" else 0.0)
