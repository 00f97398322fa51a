"""INT4 rounding that knows the inputs: GPTQ (arXiv 2210.17323). Rounding to nearest is ``formats.int4``."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kvmem.formats import int4

BLOCK = 128


def hessians(x_TK: Float[Array, "T K"], routed_TE: Bool[Array, "T E"]) -> Float[Array, "E K K"]:
    """Sum over each expert's routed tokens of x xT, in f32; add those of several batches."""
    x = x_TK.astype(jnp.float32)
    return jax.vmap(lambda mask_T: (x * mask_T[:, None]).T @ x, in_axes=1)(routed_TE.astype(jnp.float32))


@functools.partial(jax.jit, static_argnames=("group", "rule", "damping"))
def gptq(
    w_OK: Float[Array, "O K"],
    hessian_KK: Float[Array, "K K"],
    group: int,
    rule: str = "absmax/7.5",
    damping: float = 0.01,
) -> tuple[Int[Array, "O K"], Float[Array, "O G"]]:
    """Rounds column by column and moves each column's error onto those that follow, weighted by the inputs.

    ``hessian_KK`` is the sum of x xT over calibration tokens; ``damping`` times its mean diagonal is added.
    Columns go in blocks of 128 (or one group, if that does not divide K); a group's scale is taken when its
    first column is reached. Inputs that never occur are rounded to nearest. Returns as ``quantize_groups``.
    """
    rows, width = w_OK.shape
    if width % group:
        raise ValueError(f"K = {width} is not a multiple of the group {group}")
    block = BLOCK if BLOCK % group == 0 and width % BLOCK == 0 else group
    upper_KK = _inverse_factor(hessian_KK.astype(jnp.float32), damping)

    def column(i: Array, carry: tuple) -> tuple:
        w_OB, error_OB, q_OB, upper_BB, scale_O1 = carry
        real_O1 = lax.dynamic_slice_in_dim(w_OB, i, 1, 1)
        q_O1 = jnp.clip(jnp.round(real_O1 / scale_O1), -8, 7)
        row_1B = lax.dynamic_slice_in_dim(upper_BB, i, 1, 0)
        error_O1 = (real_O1 - q_O1 * scale_O1) / lax.dynamic_slice_in_dim(row_1B, i, 1, 1)
        w_OB = w_OB - error_O1 * row_1B  # row i of an upper factor is 0 left of i: only later columns move
        error_OB = lax.dynamic_update_slice_in_dim(error_OB, error_O1, i, 1)
        q_OB = lax.dynamic_update_slice_in_dim(q_OB, q_O1, i, 1)
        return w_OB, error_OB, q_OB, upper_BB, scale_O1

    def columns(b: Array, carry: tuple) -> tuple:
        w_OK, q_OK, scale_OG = carry
        start = b * block
        upper_BK = lax.dynamic_slice_in_dim(upper_KK, start, block, 0)
        upper_BB = lax.dynamic_slice_in_dim(upper_BK, start, block, 1)
        w_OB = lax.dynamic_slice_in_dim(w_OK, start, block, 1)
        error_OB, q_OB = jnp.zeros_like(w_OB), jnp.zeros_like(w_OB)
        for g in range(block // group):
            own = w_OB[:, g * group : (g + 1) * group]
            _, scale_O1 = int4.quantize_groups(own, group, rule)
            carried = (w_OB, error_OB, q_OB, upper_BB, scale_O1.astype(jnp.float32))
            w_OB, error_OB, q_OB, _, _ = lax.fori_loop(g * group, (g + 1) * group, column, carried)
            scale_OG = lax.dynamic_update_slice(scale_OG, scale_O1, (jnp.int32(0), b * (block // group) + g))
        # The block's errors move every later column at once; columns up to here are done and not read again.
        w_OK = w_OK - error_OB @ upper_BK
        return w_OK, lax.dynamic_update_slice_in_dim(q_OK, q_OB, start, 1), scale_OG

    real_OK = w_OK.astype(jnp.float32)
    empty = (real_OK, jnp.zeros_like(real_OK), jnp.zeros((rows, width // group), jnp.bfloat16))
    _, q_OK, scale_OG = lax.fori_loop(0, width // block, columns, empty)
    return q_OK.astype(jnp.int4), scale_OG


def _inverse_factor(hessian_KK: Float[Array, "K K"], damping: float) -> Float[Array, "K K"]:
    """The upper Cholesky factor of the damped Hessian's inverse."""
    diagonal_K = jnp.diagonal(hessian_KK)
    mean = jnp.mean(diagonal_K)
    # An input that never occurs decouples: it gets an identity row, as a Hessian of zeros does in whole.
    dead_K = diagonal_K <= 0
    damped = hessian_KK + jnp.diag(jnp.where(dead_K, jnp.maximum(mean, 1.0), 0.0) + damping * mean)
    identity = jnp.eye(hessian_KK.shape[0], dtype=jnp.float32)
    inverse = jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(damped), True), identity)
    return jnp.linalg.cholesky(inverse).T


def gptq_experts(
    w_EOK: Float[Array, "E O K"],
    hessian_EKK: Float[Array, "E K K"],
    tokens_E: Int[Array, E],
    group: int,
    rule: str = "absmax/7.5",
) -> tuple[Int[Array, "E O K"], Float[Array, "E O G"]]:
    """``gptq`` for every expert; an expert that saw fewer tokens than it has inputs is rounded to nearest."""
    q, scale = jax.vmap(lambda w, h: gptq(w, h, group, rule))(w_EOK, hessian_EKK)
    q_near, scale_near = int4.quantize_groups(w_EOK, group, rule)
    few = (tokens_E < w_EOK.shape[-1])[:, None, None]
    q8 = jnp.where(few, q_near.astype(jnp.int8), q.astype(jnp.int8))
    return q8.astype(jnp.int4), jnp.where(few, scale_near, scale)
