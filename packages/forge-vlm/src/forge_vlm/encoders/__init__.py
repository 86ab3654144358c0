"""What sees: from pixels to tokens."""
