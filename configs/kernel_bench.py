"""The kernels on one GPU: contract first, then microseconds beside rivals and floors. Needs an H200.

    python -m experiments.kernel_bench --config=configs/kernel_bench.py --workdir=DIR

Arguments: "" (everything, six minutes), "quick" (a shape of each), or one part: "mla" (BF16 and FP8 flat),
"mla_656", "moe", "layer".
Expected: FP8 decode of 64 rows x 16,384 tokens below 190 us, BF16 below 295.
"""

from ml_collections import ConfigDict

PARTS = ("mla", "moe", "layer", "mla_656")
SHAPES = ((1, 8192), (8, 8192), (16, 8192), (32, 8192), (64, 8192), (64, 16384), (1, 65536))


def get_config(argument: str = "") -> ConfigDict:
    if argument not in ("", "quick", *PARTS):
        raise ValueError(f"argument {argument!r}: must be empty, 'quick' or one of {PARTS}")
    quick = argument == "quick"
    config = ConfigDict()
    config.parts = (argument,) if argument in PARTS else PARTS
    config.seed = 0
    config.copy_bytes = 2**31
    # Seconds after which a part starts no further measurement: what is left out is absent, with this reason.
    config.deadline_s = {"mla": 130, "moe": 200, "layer": 270, "mla_656": 320}
    # Pages of a pool: 16,384 of 64 tokens are 64 rows x 16,384 tokens, 1.2 GB in BF16.
    config.pool_pages = 2049 if quick else 16_385
    shapes = ((8, 8192),) if quick else SHAPES
    config.mla_shapes = tuple((8, *shape) for shape in shapes)  # heads, batch, context
    config.mla_wide_shapes = () if quick else ((64, 64, 8192),)
    # Tiles beside the tuned ones, at the 64 x 8,192 shape of FP8.
    config.mla_variants = () if quick else (("consumers", 3, "stages", 3), ("words", 4), ("token_part", 32))
    config.moe_tokens = (8,) if quick else (1, 8, 16, 32, 64, 256, 1024)
    config.moe_groups = (32,) if quick else (32, 128)
    config.moe_models = ("kimi",) if quick else ("kimi", "glm")
    config.layer_models = ("kimi",) if quick else ("kimi", "glm")
    config.layer_formats = ("fp8",) if quick else ("fp8", "bf16")
    config.layer_batches = (8,) if quick else (1, 8, 32, 64)
    return config
