"""Bytes, tokens and floors from a model config: the memory and roofline model."""
