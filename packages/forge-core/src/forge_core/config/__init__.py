"""Configuration: tables, layers, problems. Importing it imports no torch."""
