"""The yardstick: the loop one would write by hand around a Llama-shaped decoder, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

SIZES: dict[str, dict[str, int]] = {
    "full": {
        "dim": 256,
        "layers": 6,
        "heads": 8,
        "kv": 4,
        "hidden": 688,
        "vocab": 512,
        "seq": 256,
        "mb": 8,
        "accum": 2,
    },
    "tiny": {
        "dim": 16,
        "layers": 1,
        "heads": 2,
        "kv": 1,
        "hidden": 32,
        "vocab": 64,
        "seq": 8,
        "mb": 8,
        "accum": 2,
    },
}
SEQUENCES = 4000


def tokens(size: dict[str, int]) -> np.ndarray[Any, Any]:
    """(SEQUENCES, seq + 1) random ids, the same for every loop."""
    rng = np.random.default_rng(0)
    return rng.integers(0, size["vocab"], (SEQUENCES, size["seq"] + 1), dtype=np.int64)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Layer(nn.Module):
    def __init__(self, size: dict[str, int]) -> None:
        super().__init__()
        dim, self.heads, self.kv = size["dim"], size["heads"], size["kv"]
        self.width = dim // self.heads
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, self.kv * self.width, bias=False)
        self.v = nn.Linear(dim, self.kv * self.width, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.gate = nn.Linear(dim, size["hidden"], bias=False)
        self.up = nn.Linear(dim, size["hidden"], bias=False)
        self.down = nn.Linear(size["hidden"], dim, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(dim, eps=1e-5), nn.RMSNorm(dim, eps=1e-5)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, length, dim = x.shape
        h = self.norm1(x)
        q = rotated(self.q(h).view(rows, length, self.heads, self.width).transpose(1, 2), cos, sin)
        k = rotated(self.k(h).view(rows, length, self.kv, self.width).transpose(1, 2), cos, sin)
        v = self.v(h).view(rows, length, self.kv, self.width).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(a.transpose(1, 2).reshape(rows, length, dim))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Net(nn.Module):
    def __init__(self, size: dict[str, int]) -> None:
        super().__init__()
        dim = size["dim"]
        width = dim // size["heads"]
        self.embed = nn.Embedding(size["vocab"], dim)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size["layers"]))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, size["vocab"], bias=False)
        angles = torch.outer(torch.arange(size["seq"]), 10000 ** (-torch.arange(0, width, 2) / width))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


def steps(size: dict[str, int], compiled: bool = False) -> Iterator[None]:
    """One update a step: accumulate, clip, fused AdamW, schedule. Yields before every update."""
    torch.manual_seed(0)
    net = Net(size)
    rows, accumulate, vocab = size["mb"], size["accum"], size["vocab"]
    matrices = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        lr=3e-4,
        betas=(0.9, 0.95),
        fused=True,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    model = torch.compile(net) if compiled else net
    data = torch.from_numpy(tokens(size))
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))
    parameters, at, total = list(net.parameters()), 0, torch.zeros(())
    while True:
        yield
        for _ in range(accumulate):
            batch = data[order[at % (len(order) - rows) :][:rows]]
            at += rows
            loss = (
                F.cross_entropy(model(batch[:, :-1]).view(-1, vocab), batch[:, 1:].reshape(-1)) / accumulate
            )
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
