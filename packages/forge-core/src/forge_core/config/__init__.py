"""Configuration: tables, layers, problems. Importing it imports no torch."""

from forge_core.config.config import Config
from forge_core.config.fields import Key, evolve, key, table
from forge_core.config.load import load_config
from forge_core.errors import ConfigError, Problem

__all__ = ["Config", "ConfigError", "Key", "Problem", "evolve", "key", "load_config", "table"]
