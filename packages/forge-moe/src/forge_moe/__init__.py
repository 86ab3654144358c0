"""Mixture-of-experts layers for Forge: routers, grouped experts, expert parallelism and their losses."""

from forge_moe.version import __version__

__all__ = ["__version__"]
