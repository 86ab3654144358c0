"""What a model that sees is asked in evaluations, and how its answers count."""
