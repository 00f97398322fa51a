"""What a pool is made of, field by field: compared at start and on every hand-over, so drift is named, not
served.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import zlib
from typing import Any

import jax
import numpy as np

from kvmem.engine.errors import FingerprintMismatch
from kvmem.engine.request import EngineConfig, PhaseFormat, SamplingParams
from kvmem.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class PoolFingerprint:
    """Everything about a pool that changes answers.

    Attributes:
      model: digest of the model's configuration.
      weights: how the device holds them. parameters: digest of their shapes, dtypes and first values.
      cache, index, scale, page_size: the stored format.
      sampling: the defaults that apply when a request names nothing.
      cache_policy: integrity detector, prefix cache and reuse of decode-made pages.
      numerics: attention form, implementation, batch invariance, prefill chunk.
      ranks: of tensor parallelism, whose sums round by their number.
      software: versions that the programs are compiled by.
    """

    model: str
    weights: str
    parameters: str
    cache: str
    index: str
    scale: float
    page_size: int
    sampling: str
    cache_policy: str
    numerics: str
    ranks: int
    software: str

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits, for incident records."""
        return f"{zlib.crc32(repr(self).encode()):08x}"


# What the two phases of one engine may differ in: that is the point of having two.
PHASE_FIELDS = frozenset({"weights", "parameters", "cache", "index", "scale", "ranks"})


def of_pool(
    model: ModelConfig, params: Any, phase: PhaseFormat, config: EngineConfig, ranks: int = 1
) -> PoolFingerprint:
    """The fingerprint of a pool that runs ``params`` in ``phase`` format on ``ranks`` devices."""
    return PoolFingerprint(
        model=_digest(model),
        weights=phase.weights,
        parameters=parameters_digest(params),
        cache=phase.cache,
        index=phase.index or "",
        scale=float(phase.scale),
        page_size=config.page_size,
        sampling=_digest(SamplingParams()),
        cache_policy=f"{config.integrity} prefix={config.prefix_cache} reuse={config.reuse}",
        numerics=f"{config.attention} {config.implementation} {config.reduction} "
        f"invariant={config.batch_invariant} chunk={config.prefill_chunk}",
        ranks=ranks,
        software=" ".join(f"{name} {_version(name)}" for name in ("kvmem", "jax", "jaxlib")),
    )


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "uninstalled"


def _digest(value: object) -> str:
    return f"{zlib.crc32(repr(value).encode()):08x}"


def parameters_digest(params: Any) -> str:
    """A digest of the tree, shapes, dtypes and the first values of each leaf: tells checkpoints apart,
    cheaply.
    """
    crc = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        first = np.asarray(leaf[(0,) * (leaf.ndim - 1)][:64] if leaf.ndim else leaf)
        crc = zlib.crc32(f"{jax.tree_util.keystr(path)}{leaf.shape}{leaf.dtype}".encode(), crc)
        crc = zlib.crc32(np.ascontiguousarray(first).view(np.uint8).tobytes(), crc)
    return f"{crc:08x}"


def require_equal(
    where: str, ours: PoolFingerprint, theirs: PoolFingerprint, *, ignore: frozenset[str] = frozenset()
) -> None:
    """Raises FingerprintMismatch naming every field, outside ``ignore``, in which two pools differ."""
    differing = {
        field.name: (getattr(ours, field.name), getattr(theirs, field.name))
        for field in dataclasses.fields(PoolFingerprint)
        if field.name not in ignore and getattr(ours, field.name) != getattr(theirs, field.name)
    }
    if differing:
        raise FingerprintMismatch(where, differing)
