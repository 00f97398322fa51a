"""Kimi K2.6 and GLM 5.2 serving in JAX with an FP8 paged cache, INT4 experts and page-integrity tags."""
