"""A random checkpoint in a published layout: what the demo loads, and what a real directory replaces."""

from __future__ import annotations

import functools
import pathlib
import shutil
import zlib
from collections.abc import Callable

import numpy as np

from kvmem.checkpoint import directory, stored
from kvmem.models import params
from kvmem.models.config import CheckpointFormat, ModelConfig
from kvmem.models.hf_config import to_hf
from kvmem.sharding.specs import ParamSpec


def write(
    path: str | pathlib.Path,
    config: ModelConfig,
    seed: int,
    checkpoint_format: CheckpointFormat,
    *,
    max_shard_bytes: int = 2**20,
) -> pathlib.Path:
    """Writes exactly the tensors of ``checkpoint_format``, config.json and an index; returns the directory.

    Weights depend on the seed and the tensor's name only: normal with variance 1 / fan-in, norms about 1,
    biases about 0, then rounded as the format stores them. A directory that exists is an error.
    """
    path = pathlib.Path(path)
    if path.exists():
        raise ValueError(f"{path}: exists already")
    tensors = params.checkpoint_tensors(config, checkpoint_format)
    shards = directory.plan_shards(tensors, max_shard_bytes)
    partial = path.with_name(path.name + ".partial")
    value = _values(config, seed, checkpoint_format, {t.name: t for t in tensors if t.kind == "vision"})
    try:
        directory.write(partial, to_hf(config, checkpoint_format), shards, value)
        return partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # nothing half-written stays, whatever happened


def _values(
    config: ModelConfig,
    seed: int,
    checkpoint_format: CheckpointFormat,
    vision: dict[str, params.CheckpointTensor],
) -> Callable[[str], np.ndarray]:
    recipes: dict[str, tuple[str, str, ParamSpec]] = {}
    for _, spec in params.leaves(params.param_specs(config, "bf16", checkpoint_format)):
        for base in params.source_names(spec):
            for suffix in stored.suffixes(spec.source.storage):
                recipes[base + suffix] = (base, suffix, spec)

    def noise(name: str, shape: tuple[int, ...]) -> np.ndarray:
        generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
        return generator.standard_normal(shape, np.float32)

    @functools.lru_cache(maxsize=1)  # the tensors of one weight follow one another
    def weight(base: str, spec: ParamSpec) -> dict[str, np.ndarray]:
        shape = spec.source.shape
        real = noise(base, shape)
        if spec.init == "normal":
            real = real * np.float32(shape[-1] ** -0.5)
        else:
            real = np.float32(spec.init == "norm") + np.float32(0.1) * real
        return stored.encode(real, spec.source, config)

    def value(name: str) -> np.ndarray:
        if name in vision:
            return noise(name, vision[name].shape).astype(stored.ml_dtypes.bfloat16)
        base, suffix, spec = recipes[name]
        return weight(base, spec)[suffix]

    return value
