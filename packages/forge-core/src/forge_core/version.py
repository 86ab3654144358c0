"""Release (CalVer, the same for every package of this repository) and version of the plugin contract."""

__version__ = "2026.12.0"

FORGE_API = 1
"""Moves only when a hook, a public name or a guarantee that plugins rely on changes incompatibly."""
