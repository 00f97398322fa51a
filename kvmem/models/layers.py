"""Layers without state: norms, rotary embedding, linear maps over plain or quantised weights."""

import functools
import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from kvmem.formats.qtensor import QTensor
from kvmem.models.config import RopeConfig, yarn_mscale
from pallas_kernels import allreduce

# What sums the parts of the ranks: NCCL, the one-shot kernel, or that kernel with residual add and norm.
Reduction = Literal["nccl", "mosaic", "mosaic_norm"]
REDUCTIONS = ("nccl", "mosaic", "mosaic_norm")
Join = Callable[[Array, Array, Array, int | Array], tuple[Array, Array]]


def layer_of(tree, index: int | Int[Array, ""]):
    """One layer of stacked parameters: entry ``index`` of the leading axis of every array."""
    return jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, index, keepdims=False), tree)


def plain(weight: Array | QTensor, dtype: jax.typing.DTypeLike) -> Array:
    """The weight as ``dtype``; a quantised one is dequantised, a plain one must already have it."""
    return weight.dequantize(dtype) if isinstance(weight, QTensor) else weight


def einsum(equation: str, *operands: Array) -> Float[Array, "..."]:
    """Einsum that accumulates and returns f32; f32 operands are multiplied in full f32, never in TF32.

    On a CPU bf16 operands are widened first, which changes no product: XLA has no bf16 x bf16 -> f32 there.
    """
    product = functools.partial(jnp.einsum, equation, preferred_element_type=jnp.float32)
    if any(x.dtype == jnp.float32 for x in operands):
        return product(*operands, precision=lax.Precision.HIGHEST)

    def widened(*narrow: Array) -> Array:
        return product(*(x.astype(jnp.float32) for x in narrow), precision=lax.Precision.HIGHEST)

    return lax.platform_dependent(*operands, cpu=widened, default=product)


def linear(x: Float[Array, "... K"], weight: Array | QTensor) -> Float[Array, "... O"]:
    """``x @ weight.T`` for a weight [O, K], accumulated in f32 and rounded to x's dtype."""
    return partial_linear(x, weight).astype(x.dtype)


def partial_linear(x: Float[Array, "... K"], weight: Array | QTensor) -> Float[Array, "... O"]:
    """As ``linear`` but left in f32: the part of one rank, to be summed over ranks before it is rounded.

    On a GPU the product with a single row is written as a reduction: XLA then reads a layer's weights where
    they stand in their stack, and faster than as a matrix product, for which it copies them out first.
    """
    product = functools.partial(einsum, "...k,ok->...o")
    if x.size > x.shape[-1]:
        return product(x, plain(weight, x.dtype))

    def reduction(x: Array, weight_OK: Array) -> Array:
        wide_K = x.reshape(1, -1).astype(jnp.float32)
        out_O = jnp.sum(weight_OK.astype(jnp.float32) * jnp.broadcast_to(wide_K, weight_OK.shape), axis=1)
        return out_O.reshape(*x.shape[:-1], -1)

    return lax.platform_dependent(x, plain(weight, x.dtype), cpu=product, default=reduction)


def reduce_sum(x: Float[Array, "..."], axis: str | None) -> Float[Array, "..."]:
    """The sum over the ranks of mesh axis ``axis`` (an all-reduce); x itself on a single rank."""
    return x if axis is None else lax.psum(x, axis)


def joiner(axis: str | None, reduction: Reduction, shape: tuple[int, ...], epsilon: float) -> Join:
    """What closes a sublayer: ``(part, hidden, norm_YD, layer) -> (hidden + sum of the parts, its norm)``.

    Parts are f32 of ``shape`` [..., D]; their sum over the ranks is rounded to hidden's dtype before it is
    added. The norm is RMSNorm with row ``layer`` of a stack. The kernels share a workspace, opened here for
    all calls of the program, so this has to be called outside of loops.

    Raises:
      ValueError: an unknown reduction; from the fused kernel, hidden states that are not bf16.
      NotImplementedError: a shape that the kernel does not take.
    """
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction={reduction!r}: must be one of {REDUCTIONS}")
    size, width = math.prod(shape), shape[-1]
    reduce: Callable[[Array], Array]
    if axis is None or lax.axis_size(axis) == 1 or reduction == "nccl":
        reduce = functools.partial(reduce_sum, axis=axis)
    elif reduction == "mosaic":
        space = allreduce.open_workspace(axis, *allreduce.tiling(size, jnp.float32), jnp.float32)
        reduce = functools.partial(allreduce.all_reduce, axis=axis, workspace=space)
    else:
        space = allreduce.open_workspace(axis, size // width, width, jnp.float32)

        def fused(part: Array, hidden: Array, norm_YD: Array, layer: int | Array) -> tuple[Array, Array]:
            part_TD, hidden_TD = part.reshape(-1, width), hidden.reshape(-1, width)
            joined, normed = allreduce.all_reduce_add_norm(
                part_TD, hidden_TD, norm_YD, layer, axis, epsilon=epsilon, workspace=space
            )
            return joined.reshape(hidden.shape), normed.reshape(hidden.shape)

        return fused

    def separate(part: Array, hidden: Array, norm_YD: Array, layer: int | Array) -> tuple[Array, Array]:
        joined = hidden + reduce(part).astype(hidden.dtype)
        return joined, rmsnorm(joined, layer_of(norm_YD, layer), epsilon)

    return separate


def rmsnorm(x: Float[Array, "... D"], weight_D: Float[Array, "D"], epsilon: float) -> Float[Array, "... D"]:
    """``weight * x / sqrt(mean(x^2) + epsilon)``, in the rounding order of the Hugging Face implementation.

    Mean and normalisation are f32; the normalised value is rounded to x's dtype before the weight multiplies.
    """
    real = x.astype(jnp.float32)
    normal = real * lax.rsqrt(jnp.mean(real * real, axis=-1, keepdims=True) + epsilon)
    return normal.astype(x.dtype) * _like(weight_D, x)


def layernorm(
    x: Float[Array, "... I"], weight_I: Float[Array, "I"], bias_I: Float[Array, "I"], epsilon: float = 1e-6
) -> Float[Array, "... I"]:
    """Mean-subtracting norm with bias, computed in f32 and rounded once."""
    real = x.astype(jnp.float32)
    centred = real - jnp.mean(real, axis=-1, keepdims=True)
    normal = centred * lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + epsilon)
    weight, bias = _like(weight_I, real), _like(bias_I, real)
    return (normal * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def _like(vector: Float[Array, "D"], x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    return jnp.broadcast_to(vector, x.shape)


def rope_frequencies(rope: RopeConfig, width: int) -> np.ndarray:
    """Radians per position of each pair, f32 [width / 2].

    Plain: theta^(-2i / width). With YaRN (arXiv 2309.00071, as in DeepSeek-V3) pairs that turn more than
    ``beta_fast`` times within the original context keep it, those below ``beta_slow`` turns are slowed by
    ``factor``, with a linear ramp between. The cos/sin multiplier mscale / mscale_all_dim must be 1.

    Raises:
      ValueError: a YaRN config whose multiplier is not 1.
    """
    base = rope.theta ** (-np.arange(0, width, 2, dtype=np.float64) / width)
    if rope.yarn is None:
        return base.astype(np.float32)
    y = rope.yarn
    if yarn_mscale(y.factor, y.mscale) != yarn_mscale(y.factor, y.mscale_all_dim):
        raise ValueError(f"mscale={y.mscale}, mscale_all_dim={y.mscale_all_dim}: must be equal")

    def pair_that_turns(times: float) -> float:
        return width * math.log(y.original_context / (2 * math.pi * times)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_that_turns(y.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(y.beta_slow)), width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / max(high - low, 1e-3), 0, 1)
    return (base * (1 - ramp) + base / y.factor * ramp).astype(np.float32)


def rotate(
    x: Float[Array, "B T *H R"], position_BT: Int[Array, "B T"], frequencies: np.ndarray
) -> Float[Array, "B T *H R"]:
    """Rotary embedding over interleaved pairs (2i, 2i+1), in place, computed in f32 and rounded once.

    transformers returns the same pairs as all evens, then all odds: a fixed permutation of queries and keys
    alike, which no dot product sees.
    """
    angle = position_BT.astype(jnp.float32)[..., None] * jnp.asarray(frequencies)[None, None]
    angle = angle.reshape(*angle.shape[:2], *(1,) * (x.ndim - 3), angle.shape[-1])
    shape = (*x.shape[:-1], x.shape[-1] // 2)
    cos, sin = jnp.broadcast_to(jnp.cos(angle), shape), jnp.broadcast_to(jnp.sin(angle), shape)
    real = x.astype(jnp.float32)
    even, odd = real[..., 0::2], real[..., 1::2]
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1)
    return turned.reshape(x.shape).astype(x.dtype)
