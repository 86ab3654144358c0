"""From images with text to rows of the core's pipeline."""
