"""NVFP4, emulated: e2m1 values in groups of 16, an e4m3 scale a group, one f32 scale a tensor.

w = value * group_scale * tensor_scale. Only for byte counts and error figures: no kernel reads it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvmem.formats import fp8

GROUP = 16
E2M1_MAX = 6.0


def quantize(
    w: Float[Array, "*N K"],
) -> tuple[Float[Array, "*N K"], Float[Array, "*N G"], Float[Array, ""]]:
    """Returns e2m1 values, e4m3 group scales [..., K // 16] and the f32 tensor scale amax / (6 * 448).

    Each value is divided by its scales as stored and rounded to nearest even in e2m1
    ({0, .5, 1, 1.5, 2, 3, 4, 6} and their negatives), clipped to +-6.
    """
    width = w.shape[-1]
    if width % GROUP:
        raise ValueError(f"K = {width} is not a multiple of NVFP4's group {GROUP}")
    real = w.astype(jnp.float32).reshape(*w.shape[:-1], width // GROUP, GROUP)
    tensor_scale = fp8.amax_scale(jnp.max(jnp.abs(real)) / E2M1_MAX)
    amax = jnp.max(jnp.abs(real), axis=-1)
    group_scale = jnp.clip(amax / E2M1_MAX / tensor_scale, 0.0, fp8.E4M3_MAX).astype(jnp.float8_e4m3fn)
    scale = group_scale.astype(jnp.float32)[..., None] * tensor_scale
    stored = jnp.where(scale > 0, real / jnp.where(scale > 0, scale, 1.0), 0.0)
    values = jnp.clip(stored, -E2M1_MAX, E2M1_MAX).astype(jnp.float4_e2m1fn)
    return values.reshape(w.shape), group_scale, tensor_scale


def dequantize(
    values: Float[Array, "*N K"],
    group_scale: Float[Array, "*N G"],
    tensor_scale: Float[Array, ""],
    dtype: jax.typing.DTypeLike,
) -> Float[Array, "*N K"]:
    """``value * group_scale * tensor_scale`` computed in f32, then rounded once to ``dtype``."""
    groups = values.astype(jnp.float32).reshape(*group_scale.shape, GROUP)
    real = groups * (group_scale.astype(jnp.float32) * tensor_scale)[..., None]
    return real.astype(dtype).reshape(values.shape)
