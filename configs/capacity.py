"""Memory and capacity of both models: arithmetic on declared parameters, exact, in seconds on a CPU.

    python -m experiments.capacity --config=configs/capacity.py --workdir=DIR
    python -m experiments.capacity --config=configs/capacity.py:glm_5.2 --workdir=DIR

The argument is "" or "quick" (both models) or the name of one model. Expected: kimi_k2.6.checkpoint_bytes
595,148,192,736; glm_5.2.fp8_bytes 755,617,140,416; at the default fraction 686 thousand BF16 and 1.37 million
FP8 tokens of Kimi, 1.22 million of GLM.
"""

from ml_collections import ConfigDict

MODELS = ("kimi_k2.6", "glm_5.2")


def get_config(argument: str = "") -> ConfigDict:
    if argument not in ("", "quick", *MODELS):
        raise ValueError(f"argument {argument!r}: must be empty, 'quick' or one of {MODELS}")
    config = ConfigDict()
    config.models = (argument,) if argument in MODELS else MODELS
    config.tp = 8
    config.page_size = 64
    config.gpu_mib = 143_771  # an H200, as its driver reports it
    # What weights and cache may take: 116.7 GiB, a Kimi rank's weights and 686,000 BF16 tokens.
    config.memory_fraction = 0.8312
    config.weights = ("bf16", "fp8", "int4_g32", "int4_g64", "int4_g128", "nvfp4")
    config.caches = ("bf16", "fp8_flat", "fp8_656")
    config.figure_weights = ("fp8", "int4_g32")
    config.floor_rows = (1, 8, 16, 32, 64)  # decode roofline at these concurrencies
    config.floor_context = 8192
    return config
