"""QTensor: a quantised weight as one pytree: data, scale, and a static description of how they relate."""

from __future__ import annotations

import typing

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from kvmem.formats import fp8, int4


@typing.no_type_check
@flax.struct.dataclass
class QTensor:
    """A weight [..., O, K] as stored.

    Attributes:
      data: e4m3 (``fp8_block``) or int4 (``int4_group``) [..., O, K].
      scale: f32 [..., ceil(O / rows), ceil(K / columns)] for fp8_block; bf16 [..., O, K // columns] for
        int4_group.
      storage: which of the two.
      group: (rows, columns) that share one scale; rows is 1 for int4_group.
    """

    data: Num[Array, ...]
    scale: Float[Array, ...]
    storage: str = flax.struct.field(pytree_node=False)
    group: tuple[int, int] = flax.struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def dequantize(self, dtype: jax.typing.DTypeLike) -> Float[Array, ...]:
        """The real weight: computed in f32, rounded once to ``dtype``."""
        if self.storage == "fp8_block":
            return fp8.dequantize_blocks(self.data, self.scale, self.group, dtype)
        return int4.dequantize_groups(self.data, self.scale, dtype)

    def layer(self, index: int | Array) -> QTensor:
        """One entry of the leading stack axis."""
        return QTensor(self.data[index], self.scale[index], self.storage, self.group)


def quantize(w: Float[Array, ...], storage: str, group: tuple[int, int]) -> QTensor:
    """Quantises a weight [..., O, K] by rounding to nearest. Errors as the format's own quantiser."""
    if storage == "fp8_block":
        data, scale = fp8.quantize_blocks(w, group)
    elif storage == "int4_group":
        if group[0] != 1:
            raise ValueError(f"INT4 group {group}: groups lie along the input axis, so the rows must be 1")
        data, scale = int4.quantize_groups(w, group[1])
    else:
        raise ValueError(f"storage {storage!r} is not 'fp8_block' or 'int4_group'")
    return QTensor(data, scale, storage, group)


def scale_shape(shape: tuple[int, ...], storage: str, group: tuple[int, int]) -> tuple[int, ...]:
    """The shape of the scales of a weight of ``shape``. A group that does not divide K (INT4) is an error."""
    *stack, rows, cols = shape
    if storage == "int4_group":
        if cols % group[1]:
            raise ValueError(f"K = {cols} is not a multiple of the group {group[1]}")
        return (*stack, rows, cols // group[1])
    return (*stack, -(-rows // group[0]), -(-cols // group[1]))


def scale_dtype(storage: str) -> jax.typing.DTypeLike:
    """f32 for fp8_block, bf16 for int4_group, as the published checkpoints hold them."""
    return jnp.float32 if storage == "fp8_block" else jnp.bfloat16
