"""Runs under stages beside the same run in one process. Runs in the workers of a pool."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import forge_pp.plugin
from forge_core.testing import isolated_plugins, run_tiny, tiny_config
from forge_core.testing.tiny import TinyRun

STEPS = 10

BASE: dict[str, dict[str, Any]] = {
    "model": {"n_layers": 4},
    "train": {"dtype": "fp64", "grad_accum_steps": 4, "batch_size": 2, "max_steps": STEPS},
    "eval": {"steps": 2, "interval": 5},
}


def merged(*layers: dict[str, Any]) -> dict[str, Any]:
    """Tables laid over each other key by key."""
    found: dict[str, Any] = {}
    for layer in layers:
        for table, keys in layer.items():
            found[table] = {**found.get(table, {}), **keys} if isinstance(keys, dict) else keys
    return found


def plugins_of(tables: dict[str, Any]) -> Any:
    """The plugins whose tables are named."""
    known: dict[str, object] = {"pp": forge_pp.plugin}
    if "moe" in tables:
        import forge_moe.plugin

        known["moe"] = forge_moe.plugin
    if "checkpoint" in tables:
        import forge_ckpt.plugin

        known["checkpoint"] = forge_ckpt.plugin
    return isolated_plugins({name: plugin for name, plugin in known.items() if name in tables})


def run(tables: dict[str, Any], folder: str | None = None) -> TinyRun:
    """Train a tiny run on this rank."""
    plugins = plugins_of(tables)
    return run_tiny(tiny_config(plugins=plugins, **tables), plugins, folder=folder)


def alone(tables: dict[str, Any]) -> dict[str, Any]:
    """What one process gives; called outside of pools."""
    return plain(run({name: keys for name, keys in tables.items() if name != "pp"}))


def on_ranks(tables: dict[str, Any]) -> dict[str, Any]:
    """What this rank's part of the run gives, plain data."""
    return plain(run(tables))


def plain(run: TinyRun) -> dict[str, Any]:
    return {
        "losses": run.losses,
        "objectives": run.objectives,
        "norms": run.grad_norms,
        "oks": run.oks,
        "evaluations": run.metric("eval/loss") if run.session.ranks.is_main else [],
        "records": run.records if run.session.ranks.is_main else [],
        "weights": run.weights,
    }


def differences(whole: dict[str, Any], ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Largest relative differences of every rank from one process, and of weights that two ranks have."""
    found = dict.fromkeys(("losses", "objectives", "norms", "weights"), 0.0)
    names: set[str] = set()
    for rank in ranks:
        for key in ("losses", "objectives", "norms"):
            assert len(rank[key]) == len(whole[key]), key
            pairs = zip(whole[key], rank[key], strict=True)
            found[key] = max(found[key], *(abs(a - b) / max(abs(a), 1e-12) for a, b in pairs))
        assert rank["oks"] == whole["oks"]
        names |= rank["weights"].keys()
        for name, value in rank["weights"].items():
            expected = whole["weights"][name]
            gap = float((value - expected).abs().max() / expected.abs().max())
            found["weights"] = max(found["weights"], gap)
    assert names == whole["weights"].keys(), names ^ whole["weights"].keys()
    evaluations = ranks[0]["evaluations"]
    assert len(evaluations) == len(whole["evaluations"])
    pairs = zip(whole["evaluations"], evaluations, strict=True)
    found["evaluations"] = max((abs(a - b) / abs(a) for a, b in pairs), default=0.0)
    return found


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def threads() -> int:
    return torch.get_num_threads()
