"""Commands of forge-ckpt."""
