"""How a checkpoint stores one weight: its tensors by suffix, from and to the real values.

``plain`` is one tensor; ``fp8_block`` adds ``_scale_inv``; ``int4_group`` is compressed-tensors' ``_packed``,
``_scale`` and ``_shape`` (models.md of GLM's FP8 release and Kimi's ``pack-quantized`` release).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kvmem.formats import fp8, int4
from kvmem.models.config import ModelConfig
from kvmem.sharding.specs import Source, Storage

SUFFIXES: dict[Storage, tuple[str, ...]] = {
    "plain": ("",),
    "fp8_block": ("", "_scale_inv"),
    "int4_group": ("_packed", "_scale", "_shape"),
}
_quantize_groups = jax.jit(int4.quantize_groups, static_argnames=("group", "rule"))
_quantize_blocks = jax.jit(fp8.quantize_blocks, static_argnames="block")


def suffixes(storage: Storage) -> tuple[str, ...]:
    """The suffixes of ``storage``; NotImplementedError for formats that are counted but not read."""
    if storage not in SUFFIXES:
        raise NotImplementedError(f"checkpoint storage {storage!r}: read and written are {sorted(SUFFIXES)}")
    return SUFFIXES[storage]


def encode(
    real: np.ndarray, source: Source, config: ModelConfig, rule: str = "absmax/7.5"
) -> dict[str, np.ndarray]:
    """The tensors that hold ``real`` (f32), by suffix, rounded to nearest. ``rule`` is INT4's scale rule."""
    suffixes(source.storage)
    if source.storage == "plain":
        return {"": real.astype(np.float32 if source.dtype == "F32" else ml_dtypes.bfloat16)}
    if source.storage == "fp8_block":
        values, scale = _quantize_blocks(real, block=config.fp8_block)
        return {"": np.asarray(values), "_scale_inv": np.asarray(scale)}
    q, scale = _quantize_groups(real, group=config.int4_group, rule=rule)
    return {
        "_packed": int4.pack_int32(np.asarray(q)),
        "_scale": np.asarray(scale),
        "_shape": np.array(real.shape, np.int32),
    }


@functools.partial(jax.jit, static_argnames=("storage", "block"))
def decode(parts: dict[str, jax.Array], storage: Storage, block: tuple[int, int]) -> jax.Array:
    """The real values in f32 of one weight or a stack of them; ``block`` is fp8_block's rows and columns."""
    suffixes(storage)
    if storage == "plain":
        return parts[""].astype(jnp.float32)
    if storage == "fp8_block":
        return fp8.dequantize_blocks(parts[""], parts["_scale_inv"], block, jnp.float32)
    return int4.dequantize_groups(int4.unpack_int32(parts["_packed"]), parts["_scale"], jnp.float32)


def check(name: str, suffix: str, value: np.ndarray, source: Source) -> None:
    """ValueError, naming the tensor, if a value is not finite or ``_shape`` contradicts the shape."""
    if suffix == "_shape":
        if tuple(value.tolist()) != source.shape:
            raise ValueError(f"{name}: weight_shape {value.tolist()} contradicts {list(source.shape)}")
        return
    if value.dtype == np.int32:
        return
    if value.dtype == ml_dtypes.float8_e4m3fn:
        bad = (value.view(np.uint8) & 0x7F) == 0x7F
    elif value.dtype == ml_dtypes.bfloat16:
        bad = (
            value.view(np.uint16) & 0x7F80
        ) == 0x7F80  # all ones in the exponent; no f32 copy of an embedding
    else:
        bad = ~np.isfinite(value)
    if bad.any():
        what = "scales" if suffix.startswith("_scale") else "values"
        raise ValueError(f"{name}: {int(bad.sum())} of {bad.size} {what} are not finite")
