"""The release: CalVer, the same for every package of this repository."""

__version__ = "2026.12.0"
