"""Checkpoints: Hugging Face directories in and out, quantisation on the way, orbax for what was converted."""
