"""The detection matrix.

python -m experiments.detection_matrix --config=configs/detection_matrix.py --workdir=DIR
    Both tiny models, pages of 4 and 64 tokens, 3 x 10^9 clean page checks: about 20 minutes on 2 cores.
    Expects every fault that tags can see detected in every trial, no collateral damage, no false positive.
python -m experiments.detection_matrix --config=configs/detection_matrix.py:quick --workdir=DIR
    One model, pages of 4 tokens, few trials: about 2 minutes.

Parts: --config.faults="('E10_flipped_bit',)" is one class, --config.models="()" only the clean runs,
--config.clean_operations=0 leaves them out.
"""

from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    """Returns the full matrix, or the one that ``arg`` names ("quick")."""
    if arg not in ("", "quick"):
        raise ValueError(f"argument {arg!r} is not one of ['', 'quick']")
    quick = arg == "quick"
    return ConfigDict(
        {
            "models": ("kimi_tiny_parity",) if quick else ("kimi_tiny_parity", "glm_tiny_parity"),
            "page_sizes": (4,) if quick else (4, 64),
            "faults": (),  # all of kvmem.evaluate.faults
            "trials": 4 if quick else 10,
            "processes": 2,
            "requests": 3,
            "new_tokens": 10,
            "seed": 2026,
            "weights_seed": 0,
            "clean_operations": 2_000 if quick else 120_000,
            "full_pool_pages": 2_049 if quick else 21_407,  # page 0 is padding
            "full_pool_checks": 500 if quick else 141_000,
        }
    )
