"""Several GPUs: tensor parallelism, the one-shot all-reduce, the hand-over, rank agreement.

    python -m experiments.multi_gpu --config=configs/multi_gpu.py --workdir=DIR
    python -m experiments.multi_gpu --config=configs/multi_gpu.py:eight --workdir=DIR
    JAX_PLATFORMS=cpu python -m experiments.multi_gpu --config=configs/multi_gpu.py:quick --workdir=DIR

The first takes 2 H200s and 3 minutes. ``config.ranks`` is the number of GPUs; nothing else changes with it.
The second takes 8 H200s, and decodes both models at full size besides. It was not run: no such machine was at
hand; ``tests/sharding/test_full_size.py`` compiles its step programs for 8 H200s. On a CPU (``quick``, 2
minutes) the same code runs on fake devices and the timings are absent.
"""

from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    """Sizes for two H200s (""), for eight ("eight"), or tiny ones for any machine ("quick")."""
    if arg not in ("", "eight", "quick"):
        raise ValueError(f"config argument {arg!r}: one of '', 'eight', 'quick'")
    quick, eight = arg == "quick", arg == "eight"
    full = {"layers": 0, "experts": 0, "context": 2048, "steps": 40, "repeats": 5}
    return ConfigDict(
        {
            "ranks": 8 if eight else 2,
            "parts": (
                *("step", "nccl", "tiny", "handover", "mosaic"),
                *(("full_kimi", "full_glm") if eight else ()),
            ),
            # One by one, after the others: a collective that hangs holds the devices, full size their memory.
            "alone": ("mosaic", "full_kimi", "full_glm"),
            "at_once": 1 if quick else 6,
            "limit_s": 110 if arg == "" else 600,  # of each part; a part that hangs is killed
            "total_s": 125 if arg == "" else 1800,
            "seed": 12,
            "allreduce": {
                "width": 1024 if quick else 7168,
                "kib": (2, 6) if quick else (14, 28, 56, 112, 224, 448, 896),  # bf16 bytes of a message
                "few_kib": (2,) if quick else (14, 112),  # of the variants
                "traced_kib": (2, 6) if quick else (14, 28, 56, 112),
                "check_calls": 20 if quick else 4000,
                "time_calls": 40 if quick else 1000,
                "repeats": 2 if quick else 7,
            },
            "tiny": {"models": ("kimi_tiny_tp8", "glm_tiny_tp8"), "rows": 3, "prompt": 15, "steps": 6},
            "step": {
                # Kimi K2.6's widths with few layers and experts; the tiny model where quick.
                "model": "kimi_tiny_tp8" if quick else "kimi_k2.6",
                "layers": 2 if quick else 4,
                "experts": 12 if quick else 32,
                "rows": (2,) if quick else (1, 16),
                "cache": "fp8_576",
                # Implementation, reduction, compiler options.
                "variants": (("xla", "nccl", ""),)
                if quick
                else (
                    ("mosaic", "nccl", ""),
                    ("mosaic", "mosaic", ""),
                    ("mosaic", "mosaic_norm", ""),
                    ("mosaic", "nccl", "triton"),
                    ("mosaic", "mosaic", "whole"),
                ),
                "context": 20 if quick else 2048,
                "steps": 3 if quick else 40,
                "repeats": 2 if quick else 7,
            },
            # Of full size, INT4 experts and an FP8 cache: the rates that claims are compared with.
            "full_kimi": {
                "model": "kimi_k2.6",
                "cache": "fp8_576",
                "rows": (1, 8, 16, 32, 64),
                "variants": (("mosaic", "nccl", ""), ("mosaic", "mosaic", "")),
                **full,
            },
            "full_glm": {
                "model": "glm_5.2",
                "cache": "fp8_656",
                "rows": (1, 8, 16, 32, 64),
                # Sparse attention has no kernel.
                "variants": (("mosaic_experts", "nccl", ""), ("mosaic_experts", "mosaic", "")),
                **full,
            },
            "handover": {
                "model": "kimi_tiny_tp8" if quick else "kimi_k2.6",
                "layers": 2 if quick else 8,
                "experts": 12 if quick else 16,
                "tokens": 50 if quick else 4096,
                "chunk": 16 if quick else 1024,
                "page_size": 8 if quick else 64,
                "repeats": 2 if quick else 15,
            },
        }
    )
