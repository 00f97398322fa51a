"""The reference: checkpoints and logits written by transformers, in an environment of its own."""
