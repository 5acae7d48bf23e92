"""What transformers sees of PageForge."""
