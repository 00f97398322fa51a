"""Stored number formats: FP8 (e4m3), INT4 in groups, emulated NVFP4, and tensors that carry scales."""
