"""The plugin `moe`: owns the table `[moe]`, and as yet only refuses it.

A table that did nothing would let a run pass for what it is not, so naming it is a problem in every
configuration.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from forge_core import hookimpl
from forge_core.errors import Problem
from forge_moe.version import __version__

if TYPE_CHECKING:
    from forge_core.config.config import Config

forge_api = 1


@hookimpl
def forge_problems(config: Config, world_size: int) -> Iterable[Problem]:
    """One problem, whatever the table holds."""
    return [
        Problem(
            path="moe",
            message=f"forge-moe {__version__} does not implement routers or experts yet",
            hint="remove the table, or install a release that does",
        )
    ]
