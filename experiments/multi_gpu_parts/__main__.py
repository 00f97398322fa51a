"""One part in a process of its own: ``python -m experiments.multi_gpu_parts PART OUT CONFIG``."""

from __future__ import annotations

import json
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

from experiments.multi_gpu_parts import common, handover, midsize, reduce, tiny

PARTS: dict[str, Callable[[Mapping[str, Any], common.Findings], None]] = {
    "nccl": lambda config, out: reduce.allreduce(
        config, out, ("nccl", "nccl_norm", "nccl_graph", "xla_oneshot")
    ),
    "mosaic": lambda config, out: reduce.allreduce(config, out, ("mosaic", "mosaic_exchange", "mosaic_norm")),
    "tiny": tiny.tiny,
    "step": midsize.mid_step,
    "full_kimi": lambda config, out: midsize.mid_step(config, out, "full_kimi"),
    "full_glm": lambda config, out: midsize.mid_step(config, out, "full_glm"),
    "handover": handover.handover,
}

if __name__ == "__main__":
    part, path, settings = sys.argv[1:]
    PARTS[part](json.loads(settings), common.Findings(pathlib.Path(path)))
