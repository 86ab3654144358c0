"""Where a row of blocks is cut into stages. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence


def even_cuts(costs: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0) -> list[int]:
    """Numbers of the blocks that stages 1, 2, ... begin with, so that the dearest stage costs least.

    Every stage gets at least one block; of equally good cuts, early stages get the longer parts.

    Args:
        costs: of each block, in order; at least as many as stages.
        first, last: what the first and the last stage cost besides (embedding, head).
    """
    total = len(costs)
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[n][i]: least possible maximum for the first n stages over blocks 0..i
    best = [[float("inf")] * (total + 1) for _ in range(stages + 1)]
    cut = [[0] * (total + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for n in range(1, stages + 1):
        more = (first if n == 1 else 0.0) + (last if n == stages else 0.0)
        for end in range(n, total - (stages - n) + 1):
            for begin in range(end - 1, n - 2, -1):
                cost = max(best[n - 1][begin], sums[end] - sums[begin] + more)
                if cost < best[n][end]:
                    best[n][end], cut[n][end] = cost, begin
    cuts, end = [], total
    for n in range(stages, 0, -1):
        end = cut[n][end]
        cuts.append(end)
    return cuts[-2::-1] if stages > 1 else []
