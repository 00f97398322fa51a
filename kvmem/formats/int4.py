"""Symmetric INT4 in groups along the input axis: w[o, k] = q[o, k] * scale[o, k // group].

The checkpoint layout is compressed-tensors' ``pack-quantized``: eight values to an int32 along the input
axis, low nibble first, stored as q + 8. On the device the values are real ``int4`` arrays.
"""

from __future__ import annotations

from typing import overload

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

# compressed-tensors divides by 7.5; Kimi's own scales look like absmax / 7; GGUF's Q4_0 divides by 8.
RULES: dict[str, float] = {"absmax/7.5": 7.5, "absmax/7": 7.0, "absmax/8": 8.0}
_PER_WORD = 8
# Flips the top bit of each nibble: offset binary (q + 8) to two's complement and back.
_OFFSET = np.uint32(0x88888888)


def quantize_groups(
    w: Float[Array, "*N O K"], group: int, rule: str = "absmax/7.5"
) -> tuple[Int[Array, "*N O K"], Float[Array, "*N O G"]]:
    """Rounds to nearest: scale = absmax / divisor in bf16, q = clamp(round(w / scale), -8, 7).

    q is computed with the scale as stored, so the error is at most scale / 2 where nothing clamps; the
    largest value of a group, if positive, clamps to 7 (absmax/8: one scale of error). A group of zeros has
    scale 1 and exact zeros. Returns int4 [..., O, K] and bf16 scales [..., O, K // group].
    """
    if rule not in RULES:
        raise ValueError(f"INT4 scale rule {rule!r} is not one of {sorted(RULES)}")
    width = w.shape[-1]
    _check_group(width, group)
    real = w.astype(jnp.float32).reshape(*w.shape[:-1], width // group, group)
    scale = (jnp.max(jnp.abs(real), axis=-1) / RULES[rule]).astype(jnp.bfloat16)
    # A subnormal scale would be flushed to zero; 1 stores the group as zeros.
    scale = jnp.where(scale >= jnp.finfo(jnp.bfloat16).tiny, scale, jnp.ones_like(scale))
    q = jnp.clip(jnp.round(real / scale.astype(jnp.float32)[..., None]), -8, 7)
    return q.astype(jnp.int4).reshape(w.shape), scale


def dequantize_groups(
    q: Int[Array, "*N O K"], scale: Float[Array, ...], dtype: jax.typing.DTypeLike
) -> Float[Array, "*N O K"]:
    """``q * scale`` of the group, computed in f32, then rounded once to ``dtype``. The group is K // G."""
    if q.shape[:-1] != scale.shape[:-1]:
        raise ValueError(f"scales of shape {scale.shape} for values of shape {q.shape}: rows differ")
    _check_group(q.shape[-1], q.shape[-1] // scale.shape[-1])
    groups = q.astype(jnp.float32).reshape(*scale.shape, q.shape[-1] // scale.shape[-1])
    return (groups * scale.astype(jnp.float32)[..., None]).astype(dtype).reshape(q.shape)


@overload
def pack_int32(q: np.ndarray) -> np.ndarray: ...
@overload
def pack_int32(q: jax.Array) -> jax.Array: ...
def pack_int32(q):
    """Packs int4 values [..., K] into int32 [..., ceil(K / 8)]; the last word is padded with zero bits.

    numpy arrays stay numpy, JAX arrays stay JAX.
    """
    xp = np if isinstance(q, np.ndarray) else jnp
    padding = -q.shape[-1] % _PER_WORD
    # Zero bits in the stored form are the value -8.
    filled = xp.pad(q.astype(xp.int8), [(0, 0)] * (q.ndim - 1) + [(0, padding)], constant_values=-8)
    words = filled.reshape(*q.shape[:-1], -1, _PER_WORD)
    if xp is jnp:
        return (lax.bitcast_convert_type(words.astype(jnp.int4), jnp.uint32) ^ _OFFSET).view(jnp.int32)
    nibbles = words.view(np.uint8) & np.uint8(0xF)
    pairs = np.ascontiguousarray(nibbles[..., 0::2] | (nibbles[..., 1::2] << np.uint8(4)))
    return (pairs.view("<u4")[..., 0] ^ _OFFSET).view(np.int32)


@overload
def unpack_int32(packed: np.ndarray, width: int | None = None) -> np.ndarray: ...
@overload
def unpack_int32(packed: jax.Array, width: int | None = None) -> jax.Array: ...
def unpack_int32(packed, width=None):
    """Unpacks int32 [..., words] into int4 [..., width]; ``width`` (default 8 * words) drops the padding."""
    words = packed.shape[-1]
    width = words * _PER_WORD if width is None else width
    if -(-width // _PER_WORD) != words:
        raise ValueError(
            f"{width} INT4 values need {-(-width // _PER_WORD)} int32 words, the array has {words}"
        )
    if not isinstance(packed, np.ndarray):
        nibbles = lax.bitcast_convert_type(packed.view(jnp.uint32) ^ _OFFSET, jnp.int4)
        return nibbles.reshape(*packed.shape[:-1], -1)[..., :width]
    signed = (np.ascontiguousarray(packed).view(np.uint32) ^ _OFFSET).astype("<u4")[..., None].view(np.int8)
    # Arithmetic shifts extend the sign: the low nibble through the top of its byte, the high one directly.
    pairs = np.stack([(signed << 4) >> 4, signed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)[..., :width].astype(ml_dtypes.int4)


def _check_group(width: int, group: int) -> None:
    if group < 1 or width % group:
        raise ValueError(f"K = {width} is not a multiple of the group {group}")
