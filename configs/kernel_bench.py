"""The kernels on one GPU: contract first, then microseconds beside rivals and floors. Needs an H200.

    python -m experiments.kernel_bench --config=configs/kernel_bench.py --workdir=DIR

Arguments: "" (everything, nine minutes), "quick" (a shape of each), or parts joined by "+": "layer", "mla"
(BF16 and FP8 flat), "moe", "mla_656". Records of several runs add up: of each metric the newest counts.
Expected: FP8 decode of 64 rows x 16,384 tokens below 190 us, BF16 below 295.
"""

from ml_collections import ConfigDict

PARTS = ("layer", "mla", "moe", "mla_656")  # what is worth most first
SHAPES = ((1, 8192), (8, 8192), (16, 8192), (32, 8192), (64, 8192), (64, 16384), (1, 65536))


def get_config(argument: str = "") -> ConfigDict:
    quick = argument == "quick"
    parts = PARTS if argument in ("", "quick") else tuple(argument.split("+"))
    if unknown := set(parts) - set(PARTS):
        raise ValueError(
            f"argument {argument!r}: must be empty, 'quick' or of {PARTS}, not {sorted(unknown)}"
        )
    config = ConfigDict()
    config.parts = parts
    config.seed = 0
    config.copy_bytes = 2**31
    # Seconds after which a part starts no further measurement: what is left out is absent, with this reason.
    config.deadline_s = {"layer": 260, "mla": 390, "moe": 460, "mla_656": 520}
    # Pages of a pool: 16,384 of 64 tokens are 64 rows x 16,384 tokens, 1.2 GB in BF16.
    config.pool_pages = 2049 if quick else 16_385
    shapes = ((8, 8192),) if quick else SHAPES
    config.mla_shapes = tuple((8, *shape) for shape in shapes)  # heads, batch, context
    config.mla_wide_shapes = () if quick else ((64, 64, 8192),)
    config.mla_ragged_shapes = () if quick else ((8, 64, 8192),)  # Zipf's lengths of this mean
    # Tiles beside the tuned ones, at the 64 x 8,192 shape of FP8.
    config.mla_variants = () if quick else (("consumers", 3, "stages", 3), ("words", 4), ("token_part", 32))
    config.moe_tokens = (8,) if quick else (1, 8, 16, 32, 64, 256, 1024, 4096)
    config.moe_loads = (
        () if quick else ((64, "zipf"), (64, "one"), (1024, "zipf"), (1024, "one"))
    )  # of group 32
    config.moe_groups = (32,) if quick else (32, 128)
    config.moe_models = ("kimi",) if quick else ("kimi", "glm")
    config.layer_models = ("kimi",) if quick else ("kimi", "glm")
    config.layer_formats = ("fp8",) if quick else ("fp8", "bf16")
    config.layer_batches = (8,) if quick else (1, 8, 16, 32, 64)
    return config
