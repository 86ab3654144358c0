"""Pipeline parallelism for Forge: any model that can be split, run by any of torch's schedules."""

from forge_pp.version import __version__

__all__ = ["__version__"]
