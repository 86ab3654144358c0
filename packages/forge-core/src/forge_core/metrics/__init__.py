"""Seeing a run: what is measured, where it goes, and the report."""
