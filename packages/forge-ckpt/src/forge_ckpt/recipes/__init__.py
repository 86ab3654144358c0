"""Recipes that keep checkpoints."""
