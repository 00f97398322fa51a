"""What the page check costs on an H200: alone, and inside a decode step of one rank of Kimi K2.6.

    python -m experiments.check_cost --config=configs/check_cost.py --workdir=DIR

Tables of 64 rows x 4,096 columns over 21,406 pages of 64 tokens; 16 of 61 layers. Two and a half minutes on
one H200, most of them compilation. "quick" is a batch of 8 at one context. Expected: a step longer by well
under one percent with tags.
"""

from ml_collections import ConfigDict


def get_config(argument: str = "") -> ConfigDict:
    if argument not in ("", "quick"):
        raise ValueError(f"argument {argument!r} is not one of ['', 'quick']")
    quick = argument == "quick"
    return ConfigDict(
        {
            "seed": 0,
            "model": "kimi_k2.6",
            "pages": 21_407,  # page 0 is padding
            "columns": 4_096,
            "batches": (8,) if quick else (8, 1, 64),
            "contexts": (8_192,) if quick else (8_192, 2_048),
            "layers": 16,
            "implementation": "mosaic",
            "digest_pages": 1,  # of a row and step, beside the one that is written next
            "chain": 24,  # checks of a program: 24 tables and promises of 3 MiB exceed the L2
            "digest_chain": 4,
            "runs": 8,
            "rounds": 2,
            "deadline_s": 150,  # after which no further step is measured
        }
    )
