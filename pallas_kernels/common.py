"""What the kernels share: argument checks and the committed table of tuned tiles."""

import functools
import importlib.resources
import json
import math
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2E = math.log2(math.e)


def require(condition: bool, message: str, error: type[Exception] = ValueError) -> None:
    """Raises ``error`` with ``message``, which names the value and the rule, unless the condition holds."""
    if not condition:
        raise error(message)


@functools.cache
def tuned(kernel: str) -> Any:
    """The tiles of ``kernel``, by shape class or as rows of bounds, as a sweep on an H200 chose them."""
    text = (importlib.resources.files("pallas_kernels") / "tuned" / "h200.json").read_text()
    return json.loads(text)[kernel]


def smem_tiles(columns: int, swizzle: int) -> tuple:
    """Transforms of shared memory that wgmma reads: tiles of 8 rows of so many columns, swizzled."""
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]
