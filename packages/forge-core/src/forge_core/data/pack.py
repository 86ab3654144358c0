"""The way of packing that `data.packing` names."""

from __future__ import annotations

from forge_core.data.best_fit import BestFitTokens
from forge_core.data.packing import PackedTokens, RowSource
from forge_core.data.row import TokenRow
from forge_core.data.source import SourceSpec


def pack_row(row: TokenRow, spec: SourceSpec, name: str) -> RowSource:
    """Samples of a row, put together as `spec.packing` says. A holdout shorter than a sequence becomes one
    short sequence.

    Raises:
        DataError: too few tokens for one sequence.
    """
    if spec.packing == "best_fit":
        return BestFitTokens(row, seq_len=spec.seq_len, name=name)
    seq_len = spec.seq_len
    if spec.split == "holdout":
        seq_len = min(seq_len, max(1, len(row) - 1))
    return PackedTokens(row, end=row.end, seq_len=seq_len, keep_apart=spec.pack, name=name)
