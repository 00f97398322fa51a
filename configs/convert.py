"""FP8 or BF16 checkpoint to INT4 routed experts.

    python -m experiments.convert --config=configs/convert.py --config.source=DIR --workdir=runs/int4

writes ``runs/int4/checkpoint``, a Hugging Face directory. GLM 5.2's 756 GB of FP8 become 451 GB; one weight
is in memory at a time, an interrupted run continues with ``--resume``. ``:orbax`` writes loaded parameters
instead (``--config.weights`` says in which format), for starts without unpacking.
"""

from ml_collections import ConfigDict


def get_config(argument: str = "") -> ConfigDict:
    if argument not in ("", "orbax"):
        raise ValueError(f"configs/convert.py:{argument}: the argument is empty or 'orbax'")
    return ConfigDict(
        {
            "source": "",  # a Hugging Face directory
            "target": argument or "directory",
            "group": 32,
            "rule": "absmax/7.5",
            "max_shard_bytes": 5 * 10**9,
            "weights": "int4_group",  # of orbax
        }
    )
