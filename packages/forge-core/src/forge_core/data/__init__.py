"""Data: sources of samples, their order, and the batches made of them. Importing this imports no torch."""
