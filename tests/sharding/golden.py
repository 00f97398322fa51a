"""The sharding of every parameter as JSON files, which ``python -m tests.sharding.golden`` rewrites."""

import json
import pathlib

from kvmem.models import get_config, params
from kvmem.sharding import rules

DIRECTORY = pathlib.Path(__file__).parent / "golden"
CASES = [
    ("kimi_k2.6", "int4_group"),
    ("glm_5.2", "fp8_block"),
    ("glm_5.2", "int4_group"),
    ("kimi_tiny_tp8", "int4_group"),
    ("glm_tiny_tp8", "fp8_block"),
]


def table(name: str, weights: str, shards: int = 8) -> dict[str, dict]:
    """For each parameter its storage, full shape, mesh axes, and the shape one of ``shards`` ranks holds."""
    rows = {}
    for path, spec in params.leaves(params.param_specs(get_config(name), weights)):
        entries = rules.partition(spec, shards)
        row = {
            "storage": spec.dtype if spec.group is None else spec.storage,
            "shape": list(spec.shape),
            "mesh": list(entries),
            "rank": list(rules.local_shape(spec.shape, entries, shards)),
        }
        if spec.group is not None:
            row["rank_scale"] = list(rules.local_shape(spec.scale_shape, entries, shards))
        rows[".".join(path)] = row
    return rows


def path(name: str, weights: str) -> pathlib.Path:
    return DIRECTORY / f"{name}.{weights}.tp8.json"


if __name__ == "__main__":
    DIRECTORY.mkdir(exist_ok=True)
    for case in CASES:
        lines = [f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in table(*case).items()]
        path(*case).write_text("{\n" + ",\n".join(lines) + "\n}\n")
