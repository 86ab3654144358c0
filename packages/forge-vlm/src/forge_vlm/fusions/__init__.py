"""How visual tokens meet text."""
