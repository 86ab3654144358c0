"""Which checkpoints are kept: the union of several rules. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from forge_ckpt.manifest import Manifest
from forge_ckpt.table import CheckpointConfig


def kept(checkpoints: Sequence[tuple[str, Manifest]], config: CheckpointConfig, newest: str) -> set[str]:
    """Names of the complete checkpoints that stay.

    Kept are the last `keep_last` saved (milestones count among them), those of every `keep_every` updates,
    the `keep_best` by `best_metric`, milestones, the one just saved, and with `keep_last = 0` all.

    Args:
        checkpoints: names and manifests of complete checkpoints; others are nobody's business here.
        newest: the one just saved.
    """
    ordered = sorted(checkpoints, key=lambda c: (c[1].serial, c[1].step))
    if config.keep_last == 0:
        return {name for name, _ in ordered}
    stay = {newest, *(name for name, _ in ordered[-config.keep_last :])}
    for name, manifest in ordered:
        every = config.keep_every and manifest.step % config.keep_every == 0
        if manifest.milestone or every:
            stay.add(name)
    sign = 1 if config.best_mode == "min" else -1
    ranked = sorted(
        (
            (sign * m.metrics[config.best_metric], -m.serial, name)
            for name, m in ordered
            if config.best_metric in m.metrics
        )
    )
    stay |= {name for _, _, name in ranked[: config.keep_best]}
    return stay
