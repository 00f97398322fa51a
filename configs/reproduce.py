"""The main job: every published claim beside ours.

    python -m experiments.reproduce --config=configs/reproduce.py:quick --workdir=runs/demo    # make demo
    python -m experiments.reproduce --config=configs/reproduce.py --workdir=runs/full

``quick`` takes 2 to 4 minutes on two CPU cores and ends with every arithmetic row settled; the full run
repeats the CPU sweeps more often and at more loads, in about a quarter of an hour.
"""

from ml_collections import ConfigDict


def get_config(arg: str = "") -> ConfigDict:
    """Returns the config; ``arg`` is "" or "quick"."""
    if arg not in ("", "quick"):
        raise ValueError(f"config argument {arg!r}: one of '' (full), 'quick'")
    quick = arg == "quick"
    return ConfigDict(
        {
            "models": ("kimi_tiny_tp8", "glm_tiny_tp8"),  # served through the engine; () serves none
            "checkpoints": {"kimi": "", "glm": ""},  # Hugging Face directories; "" has a random one written
            "seed": 20260803,
            "requests": "",  # a JSONL file; "" draws them from the generator
            "preset": "azure_conversation",  # of the generator
            "count": 8 if quick else 32,
            "max_prompt": 120,
            "max_new_tokens": 16,
            "page_size": 16,
            "pages": 96,
            "rows": 8,
            "concurrency": (1, 4, 8) if quick else (1, 2, 4, 8),
            "repeats": 3 if quick else 15,
            "implementation": "xla",
        }
    )
