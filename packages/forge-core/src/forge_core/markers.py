"""The marker that plugin functions carry: `from forge_core import hookimpl`."""

from __future__ import annotations

import pluggy

PROJECT = "forge"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
