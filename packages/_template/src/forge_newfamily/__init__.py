"""The family newfamily for Forge. Its table `[newfamily]` turns it on, see `forge_newfamily.plugin`."""

__version__ = "0.1.0"
