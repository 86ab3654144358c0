"""The public kit for testing plugins.

Tiny runs on a CPU, isolated plugins, standing processes, a conformance suite. It needs no
network, no accelerator and seconds. `forge_core.testing.fixtures` has the pytest fixtures.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge_core.testing.conformance import PluginConformance
    from forge_core.testing.objects import isolated_plugins, plugin_object
    from forge_core.testing.pool import WorkerError, WorkerPool, WorkerTimeoutError
    from forge_core.testing.tiny import TinyRun, run_tiny, tiny_config, tiny_model, tiny_session

_LAZY = {
    "PluginConformance": "conformance",
    "TinyRun": "tiny",
    "WorkerError": "pool",
    "WorkerPool": "pool",
    "WorkerTimeoutError": "pool",
    "isolated_plugins": "objects",
    "plugin_object": "objects",
    "run_tiny": "tiny",
    "tiny_config": "tiny",
    "tiny_model": "tiny",
    "tiny_session": "tiny",
}

__all__ = [
    "PluginConformance",
    "TinyRun",
    "WorkerError",
    "WorkerPool",
    "WorkerTimeoutError",
    "isolated_plugins",
    "plugin_object",
    "run_tiny",
    "tiny_config",
    "tiny_model",
    "tiny_session",
]


def __getattr__(name: str) -> Any:
    # on first use, so that a worker process can set its threads before torch is imported
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value
