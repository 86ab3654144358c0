"""To and from Hugging Face folders, and what is done with a checkpoint beside training."""
