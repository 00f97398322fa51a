"""Reads what ``write_reference.py`` wrote: the committed goldens, or fresh seeds under ``make parity``."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib

import numpy as np
from safetensors.numpy import load_file

CASES = ("kimi", "glm", "kimi_epsilon", "glm_epsilon")
GOLDEN = pathlib.Path(__file__).parents[1] / "models" / "golden"
# Largest difference of logits allowed, as a share of the largest logit: both sides compute in f32 but sum in
# another order. transformers reloading its own checkpoint already differs from itself by 4e-7.
TOLERANCE = 2e-5


@dataclasses.dataclass(frozen=True)
class Reference:
    """One case: a Hugging Face directory, and each prompt's tokens i32 [T] with its logits f32 [T, W]."""

    directory: pathlib.Path
    seed: int
    tokens: tuple[np.ndarray, ...]
    logits: tuple[np.ndarray, ...]


def read(case: str) -> Reference:
    """Reads a case from $KVMEM_REFERENCES if set (``make parity`` sets it), else from the goldens."""
    directory = pathlib.Path(os.environ.get("KVMEM_REFERENCES", GOLDEN)) / case
    tensors = load_file(directory / "reference.safetensors")
    count = len(tensors) // 2
    return Reference(
        directory=directory,
        seed=json.loads((directory / "reference.json").read_text())["seed"],
        tokens=tuple(tensors[f"tokens_{i}"] for i in range(count)),
        logits=tuple(tensors[f"logits_{i}"] for i in range(count)),
    )
