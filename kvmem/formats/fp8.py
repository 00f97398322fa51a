"""FP8 (e4m3fn) with explicit scales: real = stored * scale.

A cast to e4m3 gives NaN above 464, so every write here clips to +-448 first and counts what it clipped. Cache
pools hold the raw bits (uint8), because XLA on a CPU converts a whole e4m3 pool for one scatter; weights hold
real ``float8_e4m3fn`` arrays, which the kernels want.
"""

from __future__ import annotations

import typing

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt8

E4M3_MAX = 448.0
# A smaller scale would be flushed to zero, and dividing by it would make infinities out of zeros.
_MIN_SCALE = float(jnp.finfo(jnp.float32).tiny)


@typing.no_type_check
@flax.struct.dataclass
class Fp8Values:
    """Quantised values and what was lost on the way.

    Attributes:
      bits: the e4m3 bit patterns; 0x7f and 0xff (NaN) never occur.
      saturated: how many finite inputs were beyond +-448 * scale and were clipped.
      nonfinite: how many inputs were NaN or infinite; they are stored as 0.
    """

    bits: UInt8[Array, ...]
    saturated: Int[Array, ""]
    nonfinite: Int[Array, ""]


def quantize(x: Float[Array, ...], scale: float | Float[Array, ...]) -> Fp8Values:
    """Stores ``x / scale`` as e4m3: divided in f32, clipped to +-448, rounded to nearest even.

    ``scale`` is positive: a scalar, or an array of x's rank that broadcasts to it.
    """
    real = x.astype(jnp.float32)
    finite = jnp.isfinite(real)
    stored = jnp.where(finite, real, 0.0) / jnp.asarray(scale, jnp.float32)
    clipped = jnp.clip(stored, -E4M3_MAX, E4M3_MAX)
    return Fp8Values(
        bits=lax.bitcast_convert_type(clipped.astype(jnp.float8_e4m3fn), jnp.uint8),
        saturated=jnp.sum(clipped != stored, dtype=jnp.int32),
        nonfinite=jnp.sum(~finite, dtype=jnp.int32),
    )


def dequantize(
    bits: UInt8[Array, ...], scale: float | Float[Array, ...], dtype: jax.typing.DTypeLike
) -> Float[Array, ...]:
    """``e4m3(bits) * scale`` computed in f32, then rounded once to ``dtype``."""
    values = lax.bitcast_convert_type(bits, jnp.float8_e4m3fn).astype(jnp.float32)
    return (values * jnp.asarray(scale, jnp.float32)).astype(dtype)


def amax_scale(amax: Float[Array, ...]) -> Float[Array, ...]:
    """The f32 scale that maps ``amax`` to 448; 1 where ``amax`` is zero or too small to divide by."""
    scale = amax.astype(jnp.float32) / E4M3_MAX
    return jnp.where(scale >= _MIN_SCALE, scale, 1.0)


def quantize_tiles(x: Float[Array, "*N W"], tile: int = 128) -> tuple[Fp8Values, Float[Array, "*N G"]]:
    """Quantises each run of ``tile`` values along the last axis with its own scale, amax / 448.

    Returns the values and their f32 scales [..., W // tile]. A tile of zeros has scale 1 (the published
    quantiser divides 0 by 0). NaN and infinity do not enter amax; they are stored as 0 and counted.
    """
    width = x.shape[-1]
    if width % tile:
        raise ValueError(f"width {width} is not a multiple of the tile {tile}")
    real = x.astype(jnp.float32).reshape(*x.shape[:-1], width // tile, tile)
    amax = jnp.max(jnp.where(jnp.isfinite(real), jnp.abs(real), 0.0), axis=-1)
    scale = amax_scale(amax)
    values = quantize(real, scale[..., None])
    return Fp8Values(values.bits.reshape(x.shape), values.saturated, values.nonfinite), scale


def dequantize_tiles(
    bits: UInt8[Array, "*N W"], scale: Float[Array, "*N G"], dtype: jax.typing.DTypeLike
) -> Float[Array, "*N W"]:
    """The inverse of ``quantize_tiles``; the tile is W // G."""
    tiles = bits.reshape(*scale.shape, bits.shape[-1] // scale.shape[-1])
    return dequantize(tiles, scale[..., None], dtype).reshape(bits.shape)


def quantize_blocks(
    w: Float[Array, "*N O K"], block: tuple[int, int] = (128, 128)
) -> tuple[Float[Array, "*N O K"], Float[Array, "*N A B"]]:
    """Quantises a weight by blocks of ``block`` (rows, columns), the layout of published FP8 checkpoints.

    Returns e4m3 values [..., O, K] and f32 ``scale_inv`` [..., ceil(O / rows), ceil(K / columns)], with
    w = values * scale_inv. Edge blocks are smaller. ``w`` must be finite (checked where weights are read).
    """
    rows, cols = w.shape[-2:]
    padded = _blocks(w.astype(jnp.float32), block)
    scale = amax_scale(jnp.max(jnp.abs(padded), axis=(-3, -1)))
    stored = jnp.clip(padded / scale[..., :, None, :, None], -E4M3_MAX, E4M3_MAX)
    values = stored.astype(jnp.float8_e4m3fn)
    merged = values.reshape(*w.shape[:-2], scale.shape[-2] * block[0], scale.shape[-1] * block[1])
    return merged[..., :rows, :cols], scale


def dequantize_blocks(
    values: Float[Array, "*N O K"],
    scale_inv: Float[Array, "*N A B"],
    block: tuple[int, int],
    dtype: jax.typing.DTypeLike,
) -> Float[Array, "*N O K"]:
    """``values * scale_inv`` of the block, computed in f32, then rounded once to ``dtype``."""
    rows, cols = values.shape[-2:]
    expected = (*values.shape[:-2], -(-rows // block[0]), -(-cols // block[1]))
    if scale_inv.shape != expected:
        raise ValueError(
            f"scales of shape {scale_inv.shape} for {values.shape}: blocks of {block} need {expected}"
        )
    real = _blocks(values.astype(jnp.float32), block) * scale_inv[..., :, None, :, None]
    merged = real.reshape(*values.shape[:-2], expected[-2] * block[0], expected[-1] * block[1])
    return merged[..., :rows, :cols].astype(dtype)


def _blocks(w: Float[Array, "*N O K"], block: tuple[int, int]) -> Float[Array, "*N A r B c"]:
    """Pads with zeros to whole blocks and splits: [..., O, K] to [..., A, rows, B, columns]."""
    rows, cols = w.shape[-2:]
    pad = [(0, 0)] * (w.ndim - 2) + [(0, -rows % block[0]), (0, -cols % block[1])]
    padded = jnp.pad(w, pad) if any(p[1] for p in pad) else w
    return padded.reshape(
        *w.shape[:-2], padded.shape[-2] // block[0], block[0], padded.shape[-1] // block[1], block[1]
    )
