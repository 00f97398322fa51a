"""Which logical axis of a parameter is split over which mesh axis, and when a split is refused."""

from collections.abc import Mapping
from typing import Final

from jax.sharding import PartitionSpec

from kvmem.sharding.mesh import AXIS
from kvmem.sharding.specs import ParamSpec

# Heads, feed-forward widths and the vocabulary are split; latents, norms, router, indexer are on every rank.
RULES: Final[Mapping[str, str]] = {"heads": AXIS, "ffn": AXIS, "vocab": AXIS}


def partition(
    spec: ParamSpec, shards: int, name: str = "parameter", rules: Mapping[str, str] = RULES
) -> PartitionSpec:
    """The PartitionSpec of a parameter over ``shards`` ranks; its scales, if any, have the same one.

    Raises:
      ValueError: a logical axis without a rule, two dimensions on one mesh axis, a dimension that ``shards``
        does not divide, or a scale group that does not divide what one rank holds.
    """
    entries: list[str | None] = []
    for dim, axis in enumerate(spec.axes):
        if axis is None:
            entries.append(None)
            continue
        if axis not in rules:
            raise ValueError(f"{name}: logical axis {axis!r} has no rule; known are {sorted(rules)}")
        if rules[axis] in entries:
            raise ValueError(f"{name}: axes {spec.axes} put two dimensions on mesh axis {rules[axis]!r}")
        _check_split(spec, dim, shards, name)
        entries.append(rules[axis])
    return PartitionSpec(*entries)


def _check_split(spec: ParamSpec, dim: int, shards: int, name: str) -> None:
    size, from_end = spec.shape[dim], dim - len(spec.shape)
    if size % shards:
        raise ValueError(f"{name}: K={size} does not divide over {shards} shards")
    group = spec.group[from_end] if spec.group is not None and from_end >= -2 else 1
    if (size // shards) % group:
        raise ValueError(
            f"{name}: K={size} over {shards} shards is {size // shards} a rank, "
            f"which the {spec.storage} group of {group} does not divide"
        )


def local_shape(shape: tuple[int, ...], entries: PartitionSpec, shards: int) -> tuple[int, ...]:
    """The part of an array of ``shape`` that one of ``shards`` ranks holds."""
    return tuple(size // shards if entry else size for size, entry in zip(shape, entries, strict=True))
