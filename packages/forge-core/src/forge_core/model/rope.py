"""Rotary positions (Su et al. 2021) and the rules that stretch them."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from forge_core.config.fields import evolve
from forge_core.config.tables import ModelConfig, RopeScalingConfig
from forge_core.errors import ForgeError
from forge_core.model.dimensions import Dimensions


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + width / 2]) of every head by the angle of their position.

    Args:
        x: (B, S, heads, head_dim).
        cos, sin: see `RotaryTable`; they broadcast against x. `sin` carries the sign of the rotation, so that
            a rotation is one product, one swap of halves and one fused multiply-add.

    Returns:
        (B, S, heads, head_dim) in x's dtype; the arithmetic is in the wider dtype of x and the tables.
    """
    first, second = x.chunk(2, -1)
    return torch.addcmul(x * cos, torch.cat((second, first), -1), sin).to(x.dtype)


def _halves(rows: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of rows (..., 2 * head_dim) of a table, each (..., 1, head_dim)."""
    cos, sin = rows.unsqueeze(-2).chunk(2, -1)
    return cos, sin


def frequencies(model: ModelConfig, dtype: torch.dtype) -> tuple[Tensor, float]:
    """Angle per position of every pair, and the factor on cos and sin.

    Returns:
        (head_dim / 2,) on the CPU in radians a token, and 1.0 except for yarn.
    """
    width = Dimensions.of(model).head_dim
    exponents = torch.arange(0, width, 2, device="cpu").to(dtype) / width
    plain = 1.0 / model.rope_theta**exponents
    scaling = model.rope_scaling
    if scaling.type == "linear":
        return plain / scaling.factor, 1.0
    if scaling.type == "llama3":
        return _llama3(plain, scaling), 1.0
    if scaling.type == "yarn":
        return _yarn(plain, scaling, model.rope_theta)
    return plain, 1.0


def _llama3(plain: Tensor, scaling: RopeScalingConfig) -> Tensor:
    """Divide long wavelengths by the factor, leave short ones alone, blend those between (Llama 3.1)."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    turns = scaling.original_max_seq_len * plain / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - keep) * plain / scaling.factor + keep * plain


def _yarn(plain: Tensor, scaling: RopeScalingConfig, theta: float) -> tuple[Tensor, float]:
    """NTK by parts: a ramp over the number of the pair, from untouched to divided (Peng et al. 2023)."""
    width = 2 * len(plain)

    def pair_with(rotations: float) -> float:
        length = scaling.original_max_seq_len / (2 * math.pi * rotations)
        return width * math.log(length) / (2 * math.log(theta))

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    span = high - low if high != low else 1e-3
    pairs = torch.arange(width // 2, device="cpu").to(plain.dtype)
    divided = ((pairs - low) / span).clamp(0, 1)
    factor = scaling.attention_factor
    if factor is None:
        factor = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return plain * (1 - divided) + plain / scaling.factor * divided, factor


def sliding_rope(model: ModelConfig) -> ModelConfig:
    """The table with the rotary keys of its sliding layers: their own base, nothing stretched (Gemma 3)."""
    theta = model.rope_theta if model.rope_theta_sliding is None else model.rope_theta_sliding
    return evolve(model, rope_theta=theta, rope_scaling=RopeScalingConfig())


class RotaryTable:
    """cos and sin of every position up to `model.max_seq_len`, made when first asked for.

    It is no module and owns no buffer: nothing that moves, shards, casts or saves a model can leave it as
    garbage. Tables are fp32, fp64 for an fp64 model.
    """

    def __init__(self, model: ModelConfig) -> None:
        self.model = model
        self.length = Dimensions.of(model).max_seq_len
        self._factor = frequencies(model, torch.float32)[1]
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._last: tuple[Any, Any] = (None, None)
        axes = [number for number, pairs in enumerate(model.rope_sections) for _ in range(pairs)]
        self._axes = torch.tensor(axes, dtype=torch.int64, device="cpu")

    def at(self, x: Tensor, positions: Tensor | None = None, offset: int = 0) -> tuple[Tensor, Tensor]:
        """cos and sin for the positions of x (B, S, ...), on its device.

        Args:
            positions: (B, S) or (S,) int64, each under `max_seq_len`; (B, A, S): on A axes, of which
                `rope_sections` says which pairs follow which (Wang et al. 2024, "Qwen2-VL", section 2.1), and
                as large as they like, as those of time are; None: offset, offset + 1, ....

        Returns:
            Each (S, 1, head_dim), or (B, S, 1, head_dim) for positions of rows. The first half of `sin` is
            negated.

        Raises:
            ForgeError: the sequence ends beyond `max_seq_len`, or there are positions on several axes and no
                sections.
        """
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        if positions is None:
            return self._counted(x.device, dtype, offset, offset + x.shape[1])
        table, rates = self._on(x.device, dtype)
        if positions.ndim == 3:
            return _halves(self._by_axis(positions, rates))
        return _halves(F.embedding(positions, table))

    def _counted(
        self, device: torch.device, dtype: torch.dtype, begin: int, end: int
    ) -> tuple[Tensor, Tensor]:
        """For positions begin, ..., end - 1; kept, since the next forward mostly wants the same."""
        key = (begin, end, dtype, device)
        kept, found = self._last
        if kept == key:
            return found  # type: ignore[no-any-return]
        if end > self.length:
            raise ForgeError(
                f"{end} tokens are more than model.max_seq_len = {self.length}", "raise model.max_seq_len"
            )
        found = _halves(self._on(device, dtype)[0][begin:end])
        if type(found[0]) is Tensor and not torch.compiler.is_compiling():  # see `_on`
            self._last = key, found
        return found

    def _by_axis(self, positions: Tensor, rates: Tensor) -> Tensor:
        """(B, S, 2 * head_dim), rows as of the table, each pair at the position of its axis in positions
        (B, A, S)."""
        if not len(self._axes):
            raise ForgeError("positions on several axes need model.rope_sections")
        axes = self._axes.to(rates.device) % positions.shape[1]
        places = positions.index_select(1, axes).transpose(1, 2)
        return self._rows(places.to(rates.dtype) * rates)

    def _on(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The table, and the angle per position of every pair."""
        found = self._tables.get((device, dtype))
        if found is None:
            # a table born in inference mode could never take part in training
            with torch.inference_mode(False):
                rates = frequencies(self.model, dtype)[0]
                places = torch.arange(self.length, device="cpu").to(dtype)
                table = self._rows(torch.outer(places, rates))
                found = table.to(device), rates.to(device)
            # what a fake-tensor trace computed must not outlive it
            if all(type(each) is Tensor for each in found):
                self._tables[device, dtype] = found
        return found

    def _rows(self, angles: Tensor) -> Tensor:
        """(..., head_dim / 2) -> (..., 2 * head_dim): cos and signed sin side by side, so that one look-up
        finds both."""
        factor = self._factor
        cos, sin = angles.cos() * factor, angles.sin() * factor
        return torch.cat((cos, cos, -sin, sin), -1)
