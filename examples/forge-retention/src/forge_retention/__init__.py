"""Retention in the place of attention. The table `[retention]` turns it on, see `forge_retention.plugin`."""

__version__ = "0.1.0"
