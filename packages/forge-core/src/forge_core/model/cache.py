"""State of incremental decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forge_core.errors import ForgeError


class KVCache:
    """Keys and values of one attention layer. Memory is taken when the first ones arrive, in their dtype.

    Args:
        batch: rows.
        length: most tokens it will hold.
        device, dtype: of the stored tensors; None: those of the first keys.
    """

    def __init__(self, batch: int, length: int, device: Any = None, dtype: Any = None) -> None:
        self.batch, self.capacity = batch, length
        self.device, self.dtype = device, dtype
        self.length = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add S tokens (B, kv_heads, S, head_dim); returns all so far (B, kv_heads, length, head_dim).

        Raises:
            ForgeError: more tokens than it was made for.
        """
        end = self.length + keys.shape[2]
        if end > self.capacity:
            raise ForgeError(f"{end} tokens do not fit a cache of {self.capacity}")
        if self._keys is None or self._values is None:
            self._keys, self._values = self._room(keys), self._room(values)
        self._keys[:, :, self.length : end] = keys
        self._values[:, :, self.length : end] = values
        self.length = end
        return self._keys[:, :, :end], self._values[:, :, :end]

    def _room(self, like: Tensor) -> Tensor:
        shape = (self.batch, like.shape[1], self.capacity, like.shape[3])
        return like.new_zeros(shape, device=self.device, dtype=self.dtype)


class DecoderCache(list[Any]):
    """One entry a layer (None for a layer that keeps nothing), and what all layers share.

    Attributes:
        capacity: most tokens.
        length: tokens so far, padding included.
        valid: (B, capacity) bool, False for padding; None while there is none.
    """

    def __init__(self, entries: list[Any], capacity: int) -> None:
        super().__init__(entries)
        self.capacity = capacity
        self.length = 0
        self.valid: Tensor | None = None

    def admit(self, x: Tensor, valid: Tensor | None) -> None:
        """Note which of the tokens about to run, x (B, S, ...), are padding.

        Raises:
            ForgeError: more tokens than the cache holds.
        """
        end = self.length + x.shape[1]
        if end > self.capacity:
            raise ForgeError(f"{end} tokens do not fit a cache of {self.capacity}")
        if valid is not None:
            if self.valid is None:
                self.valid = torch.ones(x.shape[0], self.capacity, dtype=torch.bool, device=x.device)
            self.valid[:, self.length : end] = valid
